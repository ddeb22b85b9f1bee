"""Which source, and which of its samples, sample k of a run is: pure arithmetic."""
