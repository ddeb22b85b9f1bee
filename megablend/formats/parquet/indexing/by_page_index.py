"""Locate pages by OffsetIndexes, and count them by ColumnIndexes if these contain enough."""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int64s
from megablend.formats.parquet.decoding.headers import (
    check_headers,
    dictionaries_before,
    headers_at,
    request_headers,
)
from megablend.formats.parquet.decoding.values import DECODERS
from megablend.formats.parquet.indexing.chunk_pages import ChunkPages, PageScanContext
from megablend.formats.parquet.indexing.count import Pages, count_from_page_index
from megablend.formats.parquet.indexing.scan import scan
from megablend.formats.parquet.metadata.checks import refuse_pages
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.formats.parquet.metadata.names import Encoding
from megablend.formats.parquet.metadata.page_index import (
    ColumnIndexes,
    OffsetIndexes,
    parse_column_indexes,
    parse_offset_indexes,
)
from megablend.formats.parquet.metadata.schema import Column

_DICTIONARY_ENCODINGS = 1 << Encoding.PLAIN_DICTIONARY | 1 << Encoding.RLE_DICTIONARY
"""Bits of the dictionary encodings in `encodings` of a chunk."""


def read_page_indexes(
    search: PageScanContext, chunks: Chunks
) -> tuple[OffsetIndexes, ColumnIndexes]:
    """Read the page indexes of chunks that all have an OffsetIndex. Raises: CorruptFileError."""
    source = search.source
    num_chunks = len(chunks)
    offset_index = chunks["offset_index"]
    column_bytes = chunks["column_index_bytes"]
    # A chunk without a ColumnIndex has an empty range
    column_index = np.where(column_bytes > 0, chunks["column_index"], offset_index)
    offsets = np.concatenate((offset_index, column_index))
    sizes = np.concatenate((chunks["offset_index_bytes"], column_bytes))
    has_dictionary = (chunks["encodings"] & _DICTIONARY_ENCODINGS) > 0
    # Dictionary pages, which are read next, are requested at the same time as the page indexes
    request_headers(source, chunks["start"][has_dictionary])
    data, begins = source.read_coalesced(offsets, sizes, "the page index")
    ends = begins + sizes
    with source.error_context_of_items(offset_index, chunks["row_group"], "the OffsetIndex"):
        offset_indexes = parse_offset_indexes(
            data,
            begins[:num_chunks],
            ends[:num_chunks],
            starts=chunks["start"],
            limit=search.limit,
            num_rows=chunks["num_rows"],
        )
    with source.error_context_of_items(column_index, chunks["row_group"], "the ColumnIndex"):
        column_indexes = parse_column_indexes(
            data,
            begins[num_chunks:],
            ends[num_chunks:],
            first_page=offset_indexes.first_page,
            max_def=search.column.max_def,
        )
    return offset_indexes, column_indexes


def uniform_page_encodings(chunks: Chunks, column: Column) -> Int64s:
    """Return the encoding of the data pages of each chunk, int64 [num_chunks], or -1 if they have
    several encodings or their headers have to be read."""
    encoding_of_bits = {
        1 << encoding: encoding for physical, encoding in DECODERS if physical == column.physical
    }
    encodings = np.array(
        [encoding_of_bits.get(bits, -1) for bits in chunks["page_encodings"].tolist()], np.int64
    )
    # Levels may be bit-packed as well, so only the page headers state the encoding of the values
    if column.max_def > 0:
        encodings[chunks["encodings"] & (1 << Encoding.BIT_PACKED) > 0] = -1
    return encodings


def locate_from_page_index(
    search: PageScanContext,
    chunks: Chunks,
    encodings: Int64s,
    offset_indexes: OffsetIndexes,
    column_indexes: ColumnIndexes,
) -> ChunkPages:
    """Locate and count the pages of chunks whose page indexes have counts of tokens, and whose
    pages have the given encodings. Raises: CorruptFileError, UnsupportedFileError."""
    with search.error_context(chunks):
        pages, num_uncertain = count_from_page_index(
            offset_indexes,
            column_indexes,
            search.column,
            chunks,
            encodings,
            documents=search.documents,
        )
    scanned_bytes = 0
    if search.documents and num_uncertain:
        scanned_bytes = _scan_uncertain(search, chunks, offset_indexes, pages)
    first_offsets = offset_indexes.offsets[offset_indexes.first_page[:-1]]
    dictionaries = dictionaries_before(search.source, chunks["start"], first_offsets)
    return ChunkPages(offset_indexes.first_page, pages, dictionaries, scanned_bytes)


def _scan_uncertain(
    search: PageScanContext, chunks: Chunks, offset_indexes: OffsetIndexes, pages: Pages
) -> int:
    """Decode the levels of pages whose documents cannot be counted from the page index, and count
    the documents. Returns the number of bytes that were read. Raises: CorruptFileError,
    UnsupportedFileError."""
    uncertain = np.flatnonzero(pages["scan"])
    first_page = np.searchsorted(uncertain, offset_indexes.first_page)
    recounted = pages[uncertain]
    headers = headers_at(search.source, recounted["offset"], np.full(len(recounted), search.limit))
    with search.error_context(chunks):
        check_headers(headers, first_page, search.column)
    codecs = np.repeat(chunks["codec"], np.diff(first_page))
    scanned_bytes = scan(search.source, headers, codecs, search.column, recounted, search.in_flight)
    stated = pages["tokens"][uncertain]
    with search.error_context(chunks):
        refuse_pages(
            recounted["tokens"] != stated,
            first_page,
            lambda i: (
                f"a page has {recounted['tokens'][i]} tokens, but its ColumnIndex states {stated[i]}"
            ),
        )
    pages[uncertain] = recounted
    return scanned_bytes
