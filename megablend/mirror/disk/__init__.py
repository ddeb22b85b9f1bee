"""The mirror's folder on one machine's disk: sparse copies of source files, and for each copy a map
of the 4 KiB pages that it holds. One process, the owner, writes and evicts pages. Other processes
read them without a lock."""
