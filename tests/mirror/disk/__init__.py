"""Tests of the mirror on disk."""
