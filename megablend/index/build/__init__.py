"""Builds the tables of a snapshot from files: ranks share the work, and commit them as one."""
