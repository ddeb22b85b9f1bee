"""The pages of column chunks, found and counted in the cheapest way that is exact; by each way, all its chunks at once.

    OffsetIndex + ColumnIndex     no page is touched
    OffsetIndex + page headers    where the ColumnIndex has no counts
    walk from header to header    where there is no page index
    levels                        where none of these tells tokens or rows: V1 pages are read whole, V2 pages in part

What V2 headers say of nulls and rows is not used: the levels are at hand, exact, and small.
"""

from __future__ import annotations

import numpy as np

from megablend.formats.parquet.by_headers import count_placed, count_walked
from megablend.formats.parquet.by_page_index import are_told, count_told, read_column_indexes, read_offset_indexes
from megablend.formats.parquet.checks import refuse, sum_by_chunk
from megablend.formats.parquet.chunk_pages import ChunkPages, Search, join_parts, without_empty
from megablend.formats.parquet.column_chunk import Chunks
from megablend.formats.parquet.schema import Column


def find_pages(search: Search, chunks: Chunks) -> ChunkPages:
    """Locate and count the pages of chunks; those without rows and tokens are left out.

    Raises: CorruptFileError, UnsupportedFileError.
    """
    has_values = chunks["num_values"] > 0
    has_index = has_values & (chunks["offset_index_bytes"] > 0)
    indexed, walked = np.flatnonzero(has_index), np.flatnonzero(has_values & ~has_index)
    parts = []
    if len(indexed):
        of_indexed = chunks[indexed]
        places = read_offset_indexes(search, of_indexed)
        counts = read_column_indexes(search, of_indexed, places)
        told = are_told(of_indexed, counts, search.column)
        if told.any():
            of_told = counts.of(told, places.first_page)
            parts.append((indexed[told], count_told(search, of_indexed[told], places.of(told), of_told)))
        if not told.all():
            parts.append((indexed[~told], count_placed(search, of_indexed[~told], places.of(~told))))
    if len(walked):
        parts.append((walked, count_walked(search, chunks[walked])))
    found = without_empty(join_parts(len(chunks), parts))
    with search.blamed(chunks):
        _check_sums(found, chunks, search.column)
    return found


def _check_sums(found: ChunkPages, chunks: Chunks, column: Column) -> None:
    """The pages together must be what the metadata of chunks and row groups says. Raises MalformedError."""
    pages, first_page = found.pages, found.first_page
    continues = np.zeros(len(chunks), bool)
    filled = np.diff(first_page) > 0
    continues[filled] = pages["continues"][first_page[:-1][filled]]
    refuse(continues, lambda _: "its first page begins in the middle of a row")
    rows, are_known = sum_by_chunk(pages["rows"], first_page), sum_by_chunk(pages["rows"] < 0, first_page) == 0
    refuse(
        are_known & (rows != chunks["num_rows"]),
        lambda i: f"its pages have {rows[i]} rows, its row group {chunks['num_rows'][i]}",
    )
    tokens = sum_by_chunk(pages["tokens"], first_page)
    refuse(
        (chunks["num_levels"] == column.max_def + 1) & (tokens != chunks["top_level"]),
        lambda i: f"its pages have {tokens[i]} tokens, its metadata says {chunks['top_level'][i]}",
    )
