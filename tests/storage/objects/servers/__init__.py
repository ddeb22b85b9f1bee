"""Servers that the tests of object stores start, each once a session."""
