"""Which nodes there are, and which of them keep a piece of a file.

homes      the nodes that keep a piece, by rendezvous hashing
launchers  where the list of nodes comes from: settings, a file, Slurm, torchrun; and which entry
           this machine is
etcd       a client of etcd
etcd_members  nodes that have a lease in etcd, and their views
views      the nodes that there are, numbered: where they come and go
"""
