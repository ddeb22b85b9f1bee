"""Count pages by their headers, and by their levels if the headers are not enough."""

from __future__ import annotations

import numpy as np

from megablend.arrays import Bools, Int64s
from megablend.formats.parquet.decoding.headers import (
    check_headers,
    dictionaries_among,
    dictionaries_before,
    headers_at,
    is_data,
    walk_pages,
)
from megablend.formats.parquet.decoding.values import choose_decoders
from megablend.formats.parquet.indexing.chunk_pages import ChunkPages, PageScanContext
from megablend.formats.parquet.indexing.count import (
    PAGE_DTYPE,
    count_full,
    has_histogram,
)
from megablend.formats.parquet.indexing.scan import scan
from megablend.formats.parquet.metadata.checks import refuse, sum_by_chunk
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.formats.parquet.metadata.page_index import OffsetIndexes
from megablend.formats.parquet.metadata.schema import Column
from megablend.kernels.parquet.page_headers import Headers


def count_from_offset_index(
    search: PageScanContext, chunks: Chunks, offset_indexes: OffsetIndexes
) -> ChunkPages:
    """Count the pages of chunks that have an OffsetIndex. Raises: CorruptFileError,
    UnsupportedFileError."""
    headers = headers_at(
        search.source, offset_indexes.offsets, np.full(len(offset_indexes.offsets), search.limit)
    )
    first_offsets = offset_indexes.offsets[offset_indexes.first_page[:-1]]
    dictionaries = dictionaries_before(search.source, chunks["start"], first_offsets)
    return _count_by_headers(
        search, chunks, offset_indexes.first_page, headers, offset_indexes.rows, dictionaries
    )


def count_by_scanning_headers(search: PageScanContext, chunks: Chunks) -> ChunkPages:
    """Count the pages of chunks by scanning from header to header. Raises: CorruptFileError,
    UnsupportedFileError."""
    headers, first_page = walk_pages(search.source, chunks, search.limit, search.in_flight)
    dictionaries = dictionaries_among(headers, first_page)
    data_pages = np.flatnonzero(is_data(headers))
    headers = headers[data_pages]
    first_page = np.searchsorted(data_pages, first_page)
    unknown_rows = np.full(len(headers), -1)
    return _count_by_headers(search, chunks, first_page, headers, unknown_rows, dictionaries)


def _count_by_headers(
    search: PageScanContext,
    chunks: Chunks,
    first_page: Int64s,
    headers: Headers,
    rows: Int64s,
    dictionaries: Int64s,
) -> ChunkPages:
    """Count pages by headers and levels.

    Args:
        first_page: int64 [num_chunks + 1], number of each chunk's first data page.
        headers: HEADER_DTYPE [num_pages].
        rows: int64 [num_pages], rows that begin in each page; -1 if unknown.
        dictionaries: see ChunkPages.
    """
    with search.error_context(chunks):
        check_headers(headers, first_page, search.column)
    # Raises an error for pages that could not be decoded
    choose_decoders(search.source, headers["offset"], headers["encoding"], search.column.physical)
    levels = headers["num_values"]
    counts = np.diff(first_page)
    sums = sum_by_chunk(levels, first_page)
    with search.error_context(chunks):
        refuse(
            sums != chunks["num_values"],
            lambda i: (
                f"its pages have {sums[i]} values, but its metadata states {chunks['num_values'][i]}"
            ),
        )
    pages = np.zeros(len(headers), PAGE_DTYPE)
    for name in ("offset", "encoding", "decoded_bytes"):
        pages[name] = headers[name]
    pages["stored_bytes"] = headers["header_bytes"] + headers["stored_bytes"]
    count_full(pages, levels, rows if search.column.max_rep else levels)
    is_full = np.repeat(_are_full(chunks, search.column), counts)
    # Pages whose tokens or documents can be counted only in their levels
    uncertain = np.flatnonzero(~is_full | (pages["scan"] & search.documents))
    scanned_bytes = 0
    if len(uncertain):
        recounted = pages[uncertain]
        codecs = np.repeat(chunks["codec"], counts)[uncertain]
        scanned_bytes = scan(
            search.source, headers[uncertain], codecs, search.column, recounted, search.in_flight
        )
        pages[uncertain] = recounted
    return ChunkPages(first_page, pages, dictionaries, scanned_bytes)


def _are_full(chunks: Chunks, column: Column) -> Bools:
    """Return whether the metadata of chunks proves that each level is a token: bool [num_chunks].
    The null_count of lists proves nothing, since it does not count empty lists."""
    full: Bools = has_histogram(chunks, column) & (chunks["top_level"] == chunks["num_values"])
    if column.max_rep == 0:
        full |= (chunks["null_count"] == 0) | (column.max_def == 0)
    return full
