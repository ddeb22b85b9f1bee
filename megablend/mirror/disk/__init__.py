"""The mirror's folder on one machine's disk: one process, the owner, writes and evicts
(`page_store`); any number of others read (`mirrored_file`), without a lock."""
