"""Counting pages by their headers, and by their levels if headers are not enough; pages that cannot
be decoded one by one are read by row group."""

from __future__ import annotations

import numpy as np

from megablend.arrays import Bools, Int64s
from megablend.formats.parquet.decoding.headers import (
    NO_DICTIONARY,
    check_headers,
    dictionaries_among,
    dictionaries_before,
    headers_at,
    is_data,
    walk_pages,
)
from megablend.formats.parquet.decoding.row_group import read_row_group
from megablend.formats.parquet.decoding.values import BY_ROW_GROUP, DECODERS
from megablend.formats.parquet.indexing.chunk_pages import ChunkPages, PageScanContext, join_parts
from megablend.formats.parquet.indexing.count import (
    PAGE_DTYPE,
    count_full,
    count_rows,
    has_histogram,
)
from megablend.formats.parquet.indexing.scan import scan
from megablend.formats.parquet.metadata.checks import refuse, starts_of, sum_by_chunk
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.formats.parquet.metadata.page_index import OffsetIndexes
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.thrift import UnsupportedError
from megablend.kernels.parquet.page_counts import MAX_BYTES
from megablend.kernels.parquet.page_headers import Headers
from megablend.storage.parallel_map import parallel_map


def count_from_offset_index(
    search: PageScanContext, chunks: Chunks, places: OffsetIndexes
) -> ChunkPages:
    """Count the pages of chunks that have an OffsetIndex. Raises: CorruptFileError,
    UnsupportedFileError."""
    headers = headers_at(search.source, places.offsets, np.full(len(places.offsets), search.limit))
    first_offsets = places.offsets[places.first_page[:-1]]
    dictionaries = dictionaries_before(search.source, chunks["start"], first_offsets)
    return _count_by_headers(search, chunks, places.first_page, headers, places.rows, dictionaries)


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
    """Count pages by headers and levels. Chunks with a page that cannot be decoded by itself are
    read by row group.

    Args:
        first_page: int64 [num_chunks + 1], number of each chunk's first data page.
        headers: HEADER_DTYPE [num_pages].
        rows: int64 [num_pages], rows that begin in each page; -1 if unknown.
        dictionaries: see ChunkPages.
    """
    with search.error_context(chunks):
        check_headers(headers, first_page, search.column)
    supported = [encoding for physical, encoding in DECODERS if physical == search.column.physical]
    # Chunks that are read as a whole, and those that are read page by page
    is_whole = sum_by_chunk(~np.isin(headers["encoding"], supported), first_page) > 0
    if not is_whole.any():
        return _count(search, chunks, first_page, headers, rows, dictionaries)
    is_paged = ~is_whole
    counts = np.diff(first_page)
    kept = np.repeat(is_paged, counts)
    paged = _count(
        search,
        chunks[is_paged],
        starts_of(counts[is_paged]),
        headers[kept],
        rows[kept],
        dictionaries[is_paged],
    )
    whole = _count_by_row_group(search, chunks[is_whole])
    parts = [(np.flatnonzero(is_paged), paged), (np.flatnonzero(is_whole), whole)]
    return join_parts(len(chunks), parts)


def _count(
    search: PageScanContext,
    chunks: Chunks,
    first_page: Int64s,
    headers: Headers,
    rows: Int64s,
    dictionaries: Int64s,
) -> ChunkPages:
    """Count pages that can be decoded one by one; see `_count_by_headers`."""
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
    """Whether the metadata of chunks proves that each level is a token: bool [num_chunks]. The
    null_count of lists proves nothing, since it does not count empty lists."""
    full: Bools = has_histogram(chunks, column) & (chunks["top_level"] == chunks["num_values"])
    if column.max_rep == 0:
        full |= (chunks["null_count"] == 0) | (column.max_def == 0)
    return full


def _count_by_row_group(search: PageScanContext, chunks: Chunks) -> ChunkPages:
    """Count chunks by reading them through pyarrow; each chunk becomes one page. Raises:
    CorruptFileError, UnsupportedFileError."""
    source = search.source
    pages = np.zeros(len(chunks), PAGE_DTYPE)
    pages["offset"] = chunks["start"]
    pages["stored_bytes"] = chunks["stored_bytes"]
    pages["encoding"] = BY_ROW_GROUP
    pages["decoded_bytes"] = chunks["decoded_bytes"]

    def count(i: int) -> None:
        chunk = chunks[i]
        with source.error_context(
            int(chunk["start"]), f"the column chunk of row group {chunk['row_group']}"
        ):
            if max(chunk["stored_bytes"], chunk["decoded_bytes"]) > MAX_BYTES:
                raise UnsupportedError(
                    "its pages can only be read together, but take up more than 4 GiB; write smaller row groups"
                )
            _, offsets = read_row_group(source, search.column, int(chunk["row_group"]))
            count_rows(pages[i], offsets)

    parallel_map(count, range(len(chunks)), search.in_flight)
    none = np.full((len(chunks), 2), NO_DICTIONARY)
    return ChunkPages(np.arange(len(chunks) + 1), pages, none, int(chunks["stored_bytes"].sum()))
