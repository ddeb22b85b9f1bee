"""Text as a source: tokenised once, by all processes, to Parquet files that are then read as any
others."""
