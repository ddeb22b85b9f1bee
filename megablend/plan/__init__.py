"""Maps sample k of a run to its source and its number within the source: pure arithmetic."""
