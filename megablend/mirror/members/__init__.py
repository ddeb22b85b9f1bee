"""Determines the nodes of a cluster, and the nodes that keep each piece of a file.

homes      the nodes that keep a piece, by rendezvous hashing
launchers  the list of nodes, from settings, a file, Slurm or torchrun, and this machine's entry
etcd       a client of etcd
followed   the present values of keys in etcd
etcd_members  nodes that have a lease in etcd, and their views
views      numbered views of a cluster whose nodes come and go
"""
