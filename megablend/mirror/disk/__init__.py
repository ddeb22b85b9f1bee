"""The mirror's folder on one machine's disk: sparse copies of source files, and maps of the 4 KiB
pages that they hold. One process, the owner, writes and evicts; others read without a lock.
"""
