"""Locate and count the pages of column chunks in the cheapest exact way; chunks with the same
cheapest way are processed together.

    OffsetIndex + ColumnIndex     no page is read
    OffsetIndex + page headers    if the ColumnIndex has no counts, or the indexes disagree with
                                  the chunk's values, nulls or rows
    scan from header to header    if there is no page index
    levels                        if none of these determines tokens or rows: V1 pages are read
                                  whole, V2 pages in part

The counts of nulls and rows in V2 headers are not used: levels are exact, and small in V2 pages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.indexing.by_headers import (
    count_by_scanning_headers,
    count_from_offset_index,
)
from megablend.formats.parquet.indexing.by_page_index import (
    locate_from_page_index,
    read_page_indexes,
    uniform_page_encodings,
)
from megablend.formats.parquet.indexing.chunk_pages import (
    ChunkPages,
    PageScanContext,
    join_parts,
    without_empty,
)
from megablend.formats.parquet.indexing.count import (
    find_miscounted,
    has_histogram,
    has_token_counts,
)
from megablend.formats.parquet.metadata.checks import refuse, refuse_pages, sum_by_chunk
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.formats.parquet.metadata.schema import Column


def find_pages(search: PageScanContext, chunks: Chunks) -> ChunkPages:
    """Locate and count the pages of chunks; pages with neither rows nor tokens are left out.

    Raises: CorruptFileError if metadata or pages are damaged; UnsupportedFileError if a codec or an
        encoding is not supported.
    """
    has_values = chunks["num_values"] > 0
    has_index = has_values & (chunks["offset_index_bytes"] > 0)
    indexed = np.flatnonzero(has_index)
    unindexed = np.flatnonzero(has_values & ~has_index)
    miscounted = (chunks["num_levels"] >= 0) & (chunks["all_levels"] != chunks["num_values"])
    parts = []
    if len(indexed):
        indexed_chunks = chunks[indexed]
        offset_indexes, column_indexes = read_page_indexes(search, indexed_chunks)
        miscounted[indexed] |= find_miscounted(
            offset_indexes, column_indexes, indexed_chunks, search.column
        )
        encodings = uniform_page_encodings(indexed_chunks, search.column)
        # Chunks whose ColumnIndex is enough
        by_index = (
            (indexed_chunks["column_index_bytes"] > 0)
            & (encodings >= 0)
            & has_token_counts(column_indexes, search.column)
            & ~miscounted[indexed]
        )
        if by_index.any():
            located = locate_from_page_index(
                search,
                indexed_chunks[by_index],
                encodings[by_index],
                offset_indexes.of(by_index),
                column_indexes.of(by_index, offset_indexes.first_page),
            )
            parts.append((indexed[by_index], located))
        by_headers = ~by_index
        if by_headers.any():
            counted = count_from_offset_index(
                search, indexed_chunks[by_headers], offset_indexes.of(by_headers)
            )
            parts.append((indexed[by_headers], counted))
    if len(unindexed):
        parts.append((unindexed, _count_unindexed(search, chunks[unindexed])))
    joined = replace(join_parts(len(chunks), parts), note=_note(chunks, miscounted))
    non_empty = without_empty(joined)
    with search.error_context(chunks):
        _check_sums(non_empty, chunks, search.column)
    return non_empty


def _count_unindexed(search: PageScanContext, chunks: Chunks) -> ChunkPages:
    """Count the pages of chunks without a page index.

    On a local disk, headers are read one by one, and most of the bytes between them are never read.
    Over a network, each of these reads would wait for the previous one: the chunks are streamed
    instead, and their pages found in memory.
    """
    if not search.source.is_prefetched:
        return count_by_scanning_headers(search, chunks)
    order = np.argsort(chunks["start"], kind="stable")
    starts = chunks["start"][order]
    sizes = np.minimum(chunks["stored_bytes"][order], search.limit - starts)
    parts = []
    for part in search.source.stream(starts, sizes):
        numbers = order[part]
        parts.append((numbers, count_by_scanning_headers(search, chunks[numbers])))
    return join_parts(len(chunks), parts)


def _note(chunks: Chunks, miscounted: npt.NDArray[np.bool_]) -> str | None:
    """Return the warning about wrong page indexes, or None if none is wrong. ClickHouse 26 writes
    wrong level histograms if a dictionary overflows, and Arrow C++ 19 to 25 if rows are long;
    ClickHouse up to 25.6 writes wrong first rows of pages."""
    if not miscounted.any():
        return None
    first = int(np.argmax(miscounted))
    return (
        f"the page indexes of {miscounted.sum()} of {len(chunks)} row groups (the first is {chunks['row_group'][first]}) "
        "contradict the metadata of their column chunks, so the page headers were read instead"
    )


def _check_sums(located: ChunkPages, chunks: Chunks, column: Column) -> None:
    """Compare the pages of each chunk, each with rows or tokens, with the metadata of chunks and
    row groups. Raises: MalformedError."""
    pages = located.pages
    first_page = located.first_page
    is_first = np.zeros(len(pages) + 1, np.bool_)
    is_first[first_page] = True
    refuse_pages(
        pages["continues"] & is_first[:-1],
        first_page,
        lambda _: "its first page begins in the middle of a row",
    )
    rows = sum_by_chunk(pages["rows"], first_page)
    tokens = sum_by_chunk(pages["tokens"], first_page)
    is_known = sum_by_chunk(pages["rows"] < 0, first_page) == 0
    refuse(
        is_known & (rows != chunks["num_rows"]),
        lambda i: f"its pages have {rows[i]} rows, but its row group has {chunks['num_rows'][i]}",
    )
    refuse(
        has_histogram(chunks, column) & (tokens != chunks["top_level"]),
        lambda i: (
            f"its pages have {tokens[i]} tokens, but its metadata states {chunks['top_level'][i]}"
        ),
    )
