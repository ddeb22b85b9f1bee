"""The mirror's folder on one machine's disk: sparse copies of source files, and maps of the 4 KiB
pages that they hold.

One process, the owner, writes and evicts (`mirror.disk.page_store`); any number of others read
what is there (`mirror.disk.mirrored_file`) without a lock, and without asking the owner.
"""
