"""A run: compile a config to a ledger, open a run from its ledger, and locate its samples."""
