"""A node's HTTP server for programs other than nodes. Needs aiohttp; is imported only if
`data_port` is set."""
