"""Files that are either complete or absent: atomic writes, locks, folders that are safe to use."""
