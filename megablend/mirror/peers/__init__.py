"""Lets the nodes of a cluster read from one another, so that each byte is read from the source only
once. Requires aiohttp, and is imported only if `nodes` is set.

cluster    the whole cluster, as one node sees it: exchanges pages with the other nodes
meeting    how nodes find one another, and whether they work together
assembly   the nodes of one view
routes     where a page is read: from other nodes, or from the source
placement  which nodes keep which pieces
holders    which nodes hold which pages
announcements  the pages that this node has yet to announce to other nodes
copies     the pages that this node has yet to copy from other nodes
peer       requests to another node
busy       notifications about sources that ask for fewer requests
server     responses to requests of other nodes, at a port (`listener`)
signing    authentication of requests and answers: by a shared secret, or by certificates
"""
