"""Files to the tables of a snapshot, shared among ranks, committed as one."""
