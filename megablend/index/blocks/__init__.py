"""Blocks of an index as readers see them: decoded, split, and with extra columns."""
