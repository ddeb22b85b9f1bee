"""A corpus from the text that any machine with Python has: collected, tokenised, written in four formats."""
