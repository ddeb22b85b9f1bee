"""Compiled loops, which take arrays and fill arrays; they do no I/O and raise no errors."""
