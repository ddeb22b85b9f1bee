"""Nodes that read from one another, so that each byte leaves the source once. Needs aiohttp; is
imported only if `nodes` is set.

cluster    the nodes together: it reads from them, and answers them
meeting    how nodes find one another, and whether they work together
assembly   the nodes of one view
routes     from which nodes a page is read
holders    which nodes hold which pages
peer       requests to one other node
busy       sources that ask to be left alone, as nodes tell one another
server     answers to other nodes, over a port (`listener`)
signing    authentication of requests and answers: by a shared secret, or by certificates
"""
