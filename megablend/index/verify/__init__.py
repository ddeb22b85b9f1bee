"""Verifies indexes and the files they name, repairs indexes, and removes what no run needs."""
