"""Pages found by OffsetIndexes, and counted by ColumnIndexes where these tell enough."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.checks import refuse, refuse_pages, sum_by_chunk
from megablend.formats.parquet.chunk_pages import MAX_BYTES, ChunkPages, Search
from megablend.formats.parquet.column_chunk import Chunks
from megablend.formats.parquet.count import PAGE_DTYPE, Pages, count_by_page_index, tells_tokens
from megablend.formats.parquet.decode import DECODERS
from megablend.formats.parquet.headers import check_headers, dictionaries_before, headers_at
from megablend.formats.parquet.names import Encoding
from megablend.formats.parquet.page_index import (
    ColumnIndexes,
    OffsetIndexes,
    parse_column_indexes,
    parse_offset_indexes,
)
from megablend.formats.parquet.scan import scan
from megablend.formats.parquet.schema import Column

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def read_offset_indexes(search: Search, chunks: Chunks) -> OffsetIndexes:
    """Read the OffsetIndexes of chunks, of which each has one. Raises CorruptFileError."""
    source, offsets, sizes = search.source, chunks["offset_index"], chunks["offset_index_bytes"]
    with source.blamed_among(offsets, chunks["row_group"], "the OffsetIndex"):
        data, begins = source.read_near(offsets, sizes, "the OffsetIndex")
        return parse_offset_indexes(
            data, begins, begins + sizes, starts=chunks["start"], limit=search.limit, num_rows=chunks["num_rows"]
        )


def read_column_indexes(search: Search, chunks: Chunks, places: OffsetIndexes) -> ColumnIndexes:
    """Read the ColumnIndexes of chunks, as far as they have one. Raises CorruptFileError."""
    source, sizes = search.source, chunks["column_index_bytes"]
    offsets = np.where(sizes > 0, chunks["column_index"], 0)
    with source.blamed_among(offsets, chunks["row_group"], "the ColumnIndex"):
        data, begins = source.read_near(offsets, sizes, "the ColumnIndex")
        return parse_column_indexes(
            data,
            begins,
            begins + sizes,
            first_page=places.first_page,
            max_def=search.column.max_def,
            max_rep=search.column.max_rep,
        )


def are_told(chunks: Chunks, counts: ColumnIndexes, column: Column) -> Bools:
    """Of which chunks the page index tells tokens and encodings of all pages, bool [num_chunks]."""
    told: Bools = (chunks["column_index_bytes"] > 0) & (_only_encodings(chunks, column) >= 0)
    return told & tells_tokens(counts, column)


def count_told(search: Search, chunks: Chunks, places: OffsetIndexes, counts: ColumnIndexes) -> ChunkPages:
    """Count the pages of chunks that `are_told`. Raises CorruptFileError, UnsupportedFileError."""
    num_pages = np.diff(places.first_page)
    pages = np.zeros(len(places.offsets), PAGE_DTYPE)
    with search.blamed(chunks):
        sums = sum_by_chunk(counts.totals, places.first_page)
        refuse(
            counts.has_levels & (sums != chunks["num_values"]),
            lambda i: f"its ColumnIndex has {sums[i]} values, its metadata says {chunks['num_values'][i]}",
        )
        count_by_page_index(pages, places, counts, search.column)
    pages["offset"], pages["stored_bytes"] = places.offsets, places.sizes
    pages["encoding"] = np.repeat(_only_encodings(chunks, search.column), num_pages)
    # The index does not tell decoded sizes: shares of the chunk's.
    ratios = chunks["decoded_bytes"] / np.maximum(1, chunks["stored_bytes"])
    pages["decoded_bytes"] = np.minimum(np.ceil(places.sizes * np.repeat(ratios, num_pages)), MAX_BYTES)
    scanned = 0
    if search.documents:
        scanned = _scan_unsure(search, chunks, places, pages)
    elif pages["scan"].any():
        unknown = sum_by_chunk(pages["scan"], places.first_page) > 0
        pages["rows"][np.repeat(unknown, num_pages)] = -1
    before = dictionaries_before(search.source, chunks["start"], places.offsets[places.first_page[:-1]])
    return ChunkPages(places.first_page, pages, before, scanned)


def _scan_unsure(search: Search, chunks: Chunks, places: OffsetIndexes, pages: Pages) -> int:
    """Count pages by their levels where the counts do not tell the documents; returns the bytes that were read."""
    unsure = np.flatnonzero(pages["scan"])
    if not len(unsure):
        return 0
    first_page = np.searchsorted(unsure, places.first_page)
    again = pages[unsure]
    headers = headers_at(search.source, again["offset"], np.full(len(again), search.limit))
    with search.blamed(chunks):
        check_headers(headers, first_page, search.column)
    codecs = np.repeat(chunks["codec"], np.diff(first_page))
    scanned = scan(search.source, headers, codecs, search.column, again, search.in_flight)
    said = pages["tokens"][unsure]
    with search.blamed(chunks):
        refuse_pages(
            again["tokens"] != said,
            first_page,
            lambda i: f"a page has {again['tokens'][i]} tokens, its ColumnIndex says {said[i]}",
        )
    pages[unsure] = again
    return scanned


def _only_encodings(chunks: Chunks, column: Column) -> Int64s:
    """The encoding of all data pages, int64 [num_chunks]; -1 where there are several, or one that takes a look at the headers."""
    encodings = np.full(len(chunks), -1)
    for physical, encoding in DECODERS:
        if physical == column.physical:
            encodings[chunks["page_encodings"] == 1 << encoding] = encoding
    if column.max_def > 0:
        encodings[chunks["encodings"] & (1 << Encoding.BIT_PACKED) > 0] = -1
    return encodings
