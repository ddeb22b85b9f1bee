"""Interfaces to the operating system: translation of its errors, JSON with limits."""
