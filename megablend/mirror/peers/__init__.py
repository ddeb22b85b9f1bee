"""Nodes that read from one another, so that each byte leaves the source once. Needs aiohttp, and is
imported only if `nodes` is set.

cluster    the nodes together: reads pages from them, and sends pages to them
meeting    how nodes find one another, and whether they work together
assembly   the nodes of one view
routes     from which nodes a page is read
placement  which nodes keep which pieces
holders    which nodes hold which pages
announcements  the pages that this node has yet to announce to other nodes
copies     the pages that this node has yet to copy from other nodes
peer       requests to one other node
busy       sources that ask for fewer requests, of which nodes notify one another
server     answers to other nodes, over a port (`listener`)
signing    authentication of requests and answers: by a shared secret, or by certificates
"""
