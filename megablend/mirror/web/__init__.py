"""A node's HTTP server for programs other than nodes. Needs aiohttp, and is imported only if
`data_port` is set."""
