"""Text as a source. Text is tokenised once, by all processes, into Parquet files, which are then
read like any other Parquet files.

A text file is divided into parts. Each part is tokenised by one process into one token file. A part
is read in portions: consecutive documents that are tokenised together and written as one row group.
"""
