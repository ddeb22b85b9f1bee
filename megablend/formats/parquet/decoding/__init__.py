"""Decodes the bytes of pages to tokens."""
