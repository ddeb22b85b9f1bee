"""Map sample k of a run to its source and its number within the source: shares, epochs,
interleavings. Pure arithmetic."""
