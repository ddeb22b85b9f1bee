"""Kernels that read Parquet's metadata and pages."""
