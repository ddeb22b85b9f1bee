"""Finds a file's pages and counts their tokens."""
