"""A node's answers to HTTP programs other than nodes. Needs aiohttp; is imported only if `data_port`
is set."""
