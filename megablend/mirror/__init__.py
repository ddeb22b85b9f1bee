"""Sparse copies of source files on a machine's own disk, filled and evicted by one process a
machine, and read by all others."""
