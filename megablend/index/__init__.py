"""The index, which records where tokens are stored: built once, in parallel, and committed to a
cache on a shared path."""
