"""The storage that tests read from, where it does not matter which."""

from megablend.storage.by_scheme import make_storage

STORAGE = make_storage().for_checking()
"""Reads the files that are there at the last `stat`: tests replace them."""
