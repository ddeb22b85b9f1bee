"""What a node answers to HTTP programs that are no nodes. Needs aiohttp; is imported only where
`data_port` is set."""
