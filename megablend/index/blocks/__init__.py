"""Blocks of an index as readers see them: decoded, split, with extra columns."""
