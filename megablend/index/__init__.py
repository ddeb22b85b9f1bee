"""The index: where tokens are stored, found once, in parallel,
and committed to a cache on a shared path."""
