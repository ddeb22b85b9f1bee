"""A node's HTTP server for browsers and other programs. Requires aiohttp, and is imported only if
`data_port` is set."""
