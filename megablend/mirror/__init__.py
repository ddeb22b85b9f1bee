"""A cache of remote files on each machine's own disk, in sparse copies. On each machine one process
fills and evicts the copies, and all other processes read them."""
