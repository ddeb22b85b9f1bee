"""What describes a Parquet file: footer, schema, page headers, page indices."""
