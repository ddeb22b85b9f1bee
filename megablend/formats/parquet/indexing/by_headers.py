"""Counting pages by their headers, and by their levels if headers are not enough; the fallback
is the whole row group."""

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
    """Count the pages of chunks that have an OffsetIndex. Raises CorruptFileError,
    UnsupportedFileError."""
    headers = headers_at(search.source, places.offsets, np.full(len(places.offsets), search.limit))
    before = dictionaries_before(
        search.source, chunks["start"], places.offsets[places.first_page[:-1]]
    )
    return _count_headed(search, chunks, places.first_page, headers, places.rows, before)


def count_by_scanning_headers(search: PageScanContext, chunks: Chunks) -> ChunkPages:
    """Count the pages of chunks by scanning from header to header. Raises CorruptFileError,
    UnsupportedFileError."""
    headers, first_page = walk_pages(search.source, chunks, search.limit, search.in_flight)
    among = dictionaries_among(headers, first_page)
    data = np.flatnonzero(is_data(headers))
    headers = headers[data]
    first_page = np.searchsorted(data, first_page)
    return _count_headed(search, chunks, first_page, headers, np.full(len(headers), -1), among)


def _count_headed(
    search: PageScanContext,
    chunks: Chunks,
    first_page: Int64s,
    headers: Headers,
    rows: Int64s,
    dictionaries: Int64s,
) -> ChunkPages:
    """Count by headers and levels; chunks with a page
    that cannot be decoded separately are read by row group.

    Args:
        first_page: int64 [num_chunks + 1], the data pages of each chunk.
        headers: HEADER_DTYPE [num_pages].
        rows: int64 [num_pages], rows that begin in each; -1 if unknown.
        dictionaries: as ChunkPages has them.
    """
    with search.error_context(chunks):
        check_headers(headers, first_page, search.column)
    decoded = [encoding for physical, encoding in DECODERS if physical == search.column.physical]
    whole = sum_by_chunk(~np.isin(headers["encoding"], decoded), first_page) > 0
    if not whole.any():
        return _count(search, chunks, first_page, headers, rows, dictionaries)
    counts = np.diff(first_page)
    paged = ~whole
    kept = np.repeat(paged, counts)
    rest = _count(
        search,
        chunks[paged],
        starts_of(counts[paged]),
        headers[kept],
        rows[kept],
        dictionaries[paged],
    )
    parts = [
        (np.flatnonzero(paged), rest),
        (np.flatnonzero(whole), _by_row_group(search, chunks[whole])),
    ]
    return join_parts(len(chunks), parts)


def _count(
    search: PageScanContext,
    chunks: Chunks,
    first_page: Int64s,
    headers: Headers,
    rows: Int64s,
    dictionaries: Int64s,
) -> ChunkPages:
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
    unsure = np.flatnonzero(~is_full | (pages["scan"] & search.documents))
    scanned = 0
    if len(unsure):
        again = pages[unsure]
        codecs = np.repeat(chunks["codec"], counts)[unsure]
        scanned = scan(
            search.source, headers[unsure], codecs, search.column, again, search.in_flight
        )
        pages[unsure] = again
    return ChunkPages(first_page, pages, dictionaries, scanned)


def _are_full(chunks: Chunks, column: Column) -> Bools:
    """For which chunks the metadata proves that each level is a token; a list's null_count does not
    count empty lists."""
    full: Bools = has_histogram(chunks, column) & (chunks["top_level"] == chunks["num_values"])
    if column.max_rep == 0:
        full |= (chunks["null_count"] == 0) | (column.max_def == 0)
    return full


def _by_row_group(search: PageScanContext, chunks: Chunks) -> ChunkPages:
    """Each chunk as one page, read through pyarrow."""
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
                    "its pages can only be read together, but have more than 4 GiB; write smaller row groups"
                )
            _, offsets = read_row_group(source, search.column, int(chunk["row_group"]))
            count_rows(pages[i], offsets)

    parallel_map(count, range(len(chunks)), search.in_flight)
    none = np.full((len(chunks), 2), NO_DICTIONARY)
    return ChunkPages(np.arange(len(chunks) + 1), pages, none, int(chunks["stored_bytes"].sum()))
