"""Parses the metadata of a Parquet file: footer, schema, page headers, page indexes."""
