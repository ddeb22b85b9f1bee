"""Opens a committed snapshot of an index, or joins several."""
