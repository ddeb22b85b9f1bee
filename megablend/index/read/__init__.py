"""A committed snapshot of an index, opened; several, joined."""
