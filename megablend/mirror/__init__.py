"""Sparse copies of source files on each machine's own disk. On each machine one process fills and
evicts them, and all others read them."""
