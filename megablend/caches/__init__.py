"""Where a cache is kept: in a folder that all ranks share, or below a prefix of an object store."""
