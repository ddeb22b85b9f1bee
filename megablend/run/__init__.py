"""A run: compiled from a config to its ledger, opened from its ledger, located sample by sample."""
