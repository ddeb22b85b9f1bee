"""The places where a cache is kept: a folder that all ranks share, or a prefix of an object store."""
