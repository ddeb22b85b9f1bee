"""Text as a source: tokenised once, by all processes, to Parquet files that are then read like any
others.

A text file is divided into parts: each part is tokenised by one process to one token file. A part is
read as portions: consecutive documents that are tokenised together and written as one row group."""
