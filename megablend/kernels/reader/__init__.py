"""Kernels that the reader calls."""
