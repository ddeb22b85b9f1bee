"""Pages located by OffsetIndexes, and counted by ColumnIndexes if these contain enough."""

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


def read_page_indexes(
    search: PageScanContext, chunks: Chunks
) -> tuple[OffsetIndexes, ColumnIndexes]:
    """Read the page indexes of chunks that all have an OffsetIndex. Raises CorruptFileError."""
    source = search.source
    num_chunks = len(chunks)
    places = chunks["offset_index"]
    place_bytes = chunks["offset_index_bytes"]
    counts = chunks["column_index"]
    count_bytes = chunks["column_index_bytes"]
    counts = np.where(count_bytes > 0, counts, places)
    sizes = np.concatenate((place_bytes, count_bytes))
    has_dictionary = (chunks["encodings"] & _DICTIONARY_ENCODINGS) > 0
    # The next step, at the same time as this one
    request_headers(source, chunks["start"][has_dictionary])
    data, begins = source.read_coalesced(np.concatenate((places, counts)), sizes, "the page index")
    ends = begins + sizes
    with source.blamed_among(places, chunks["row_group"], "the OffsetIndex"):
        found = parse_offset_indexes(
            data,
            begins[:num_chunks],
            ends[:num_chunks],
            starts=chunks["start"],
            limit=search.limit,
            num_rows=chunks["num_rows"],
        )
    with source.blamed_among(counts, chunks["row_group"], "the ColumnIndex"):
        return found, parse_column_indexes(
            data,
            begins[num_chunks:],
            ends[num_chunks:],
            first_page=found.first_page,
            max_def=search.column.max_def,
            max_rep=search.column.max_rep,
        )


def uniform_page_encodings(chunks: Chunks, column: Column) -> Int64s:
    """The encoding of all data pages, int64 [num_chunks]; -1 for several, or one that requires
    reading the headers."""
    known = {
        1 << encoding: encoding for physical, encoding in DECODERS if physical == column.physical
    }
    encodings = np.array(
        [known.get(bits, -1) for bits in chunks["page_encodings"].tolist()], np.int64
    )
    if column.max_def > 0:
        encodings[chunks["encodings"] & (1 << Encoding.BIT_PACKED) > 0] = -1
    return encodings


def locate_from_page_index(
    search: PageScanContext,
    chunks: Chunks,
    encodings: Int64s,
    places: OffsetIndexes,
    counts: ColumnIndexes,
) -> ChunkPages:
    """The pages of chunks whose page indexes have token counts and encodings.
    Raises CorruptFileError, UnsupportedFileError."""
    with search.error_context(chunks):
        pages, num_unsure = count_from_page_index(
            places, counts, search.column, chunks, encodings, documents=search.documents
        )
    scanned = _scan_unsure(search, chunks, places, pages) if search.documents and num_unsure else 0
    before = dictionaries_before(
        search.source, chunks["start"], places.offsets[places.first_page[:-1]]
    )
    return ChunkPages(places.first_page, pages, before, scanned)


def _scan_unsure(
    search: PageScanContext, chunks: Chunks, places: OffsetIndexes, pages: Pages
) -> int:
    """Count pages by their levels if the counts do not determine the documents; returns the
    bytes that were read."""
    unsure = np.flatnonzero(pages["scan"])
    first_page = np.searchsorted(unsure, places.first_page)
    again = pages[unsure]
    headers = headers_at(search.source, again["offset"], np.full(len(again), search.limit))
    with search.error_context(chunks):
        check_headers(headers, first_page, search.column)
    codecs = np.repeat(chunks["codec"], np.diff(first_page))
    scanned = scan(search.source, headers, codecs, search.column, again, search.in_flight)
    said = pages["tokens"][unsure]
    with search.error_context(chunks):
        refuse_pages(
            again["tokens"] != said,
            first_page,
            lambda i: (
                f"a page has {again['tokens'][i]} tokens, but its ColumnIndex states {said[i]}"
            ),
        )
    pages[unsure] = again
    return scanned
