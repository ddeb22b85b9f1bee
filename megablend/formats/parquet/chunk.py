"""The pages of one column chunk, counted in the cheapest way that is exact.

    OffsetIndex + ColumnIndex     no page is touched
    OffsetIndex + page headers    where the ColumnIndex has no counts
    walk from header to header    where there is no page index
    levels                        where none of these tells tokens or rows: V1 pages are read whole, V2 pages in part

What V2 headers say of nulls and rows is not used: the levels are at hand, exact, and small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megablend.formats.parquet.column_chunk import ColumnChunk
from megablend.formats.parquet.count import PAGE_DTYPE, Pages, count_by_page_index, count_full, count_pieces
from megablend.formats.parquet.decode import BY_ROW_GROUP, DECODERS
from megablend.formats.parquet.headers import headers_at, is_data, walk_pages
from megablend.formats.parquet.names import Encoding, PageType
from megablend.formats.parquet.page import check_level_encodings
from megablend.formats.parquet.page_index import ColumnIndex, OffsetIndex, parse_column_index, parse_offset_index
from megablend.formats.parquet.row_group import read_row_group
from megablend.formats.parquet.scan import scan
from megablend.formats.parquet.schema import Column
from megablend.formats.parquet.source import ByteSource
from megablend.formats.parquet.thrift import MalformedError, UnsupportedError
from megablend.kernels.page_headers import Headers


@dataclass(frozen=True, slots=True)
class ChunkPages:
    """The data pages of a chunk."""

    pages: Pages
    """PAGE_DTYPE [num_pages]; those without rows and tokens are left out."""
    dictionary: tuple[int, int]
    """Offset and stored size of the dictionary page; (-1, 0) where there is none."""
    scanned_bytes: int


NO_DICTIONARY = (-1, 0)
MAX_BYTES = (1 << 32) - 1
"""What a block's sizes can hold."""


def index_chunk(source: ByteSource, chunk: ColumnChunk, column: Column, *, limit: int, documents: bool) -> ChunkPages:
    """Locate and count the pages of a chunk.

    Args:
        limit: the first byte of the footer; no page reaches beyond it.
        documents: rows, and the documents that end in each page, have to be known, even if that costs a scan.

    Raises: CorruptFileError, UnsupportedFileError.
    """
    with source.blamed(chunk.start, f"the column chunk of row group {chunk.row_group}"):
        if chunk.num_values == 0:
            found = ChunkPages(np.zeros(0, PAGE_DTYPE), NO_DICTIONARY, 0)
        else:
            places = _read_offset_index(source, chunk, limit)
            found = (
                _by_page_index(source, chunk, column, places, limit, documents)
                or _by_headers(source, chunk, column, places, limit, documents)
                or _by_row_group(source, chunk, column)
            )
        pages = found.pages
        kept = pages[(pages["rows"] != 0) | (pages["tokens"] > 0)]
        _check_sums(kept, chunk, column)
    return ChunkPages(kept, found.dictionary, found.scanned_bytes)


def _by_page_index(
    source: ByteSource, chunk: ColumnChunk, column: Column, places: OffsetIndex | None, limit: int, documents: bool
) -> ChunkPages | None:
    """From the page index alone; None where it does not tell tokens or encodings."""
    counts = None if places is None else _read_column_index(source, chunk, column, len(places.offsets))
    encoding = _only_encoding(chunk, column)
    if places is None or counts is None or encoding is None:
        return None
    if counts.levels is not None and counts.levels.sum() != chunk.num_values:
        raise MalformedError(f"its ColumnIndex has {counts.levels.sum()} values, its metadata says {chunk.num_values}")
    pages = np.zeros(len(places.offsets), PAGE_DTYPE)
    if not count_by_page_index(pages, places, counts, column):
        return None
    pages["offset"], pages["stored_bytes"], pages["encoding"] = places.offsets, places.sizes, encoding
    # The index does not tell decoded sizes: shares of the chunk's.
    decoded = np.ceil(places.sizes * (chunk.decoded_bytes / max(1, chunk.stored_bytes)))
    pages["decoded_bytes"] = np.minimum(decoded, MAX_BYTES)
    scanned = 0
    if not documents and pages["scan"].any():
        pages["rows"] = -1
    elif pages["scan"].any():
        unsure = pages[pages["scan"]]
        tokens = unsure["tokens"].copy()
        headers = headers_at(source, unsure["offset"], limit)
        _check_headers(headers, column)
        scanned = scan(source, headers, chunk.codec, column, unsure)
        if (unsure["tokens"] != tokens).any():
            i = np.flatnonzero(unsure["tokens"] != tokens)[0]
            raise MalformedError(f"a page has {unsure['tokens'][i]} tokens, its ColumnIndex says {tokens[i]}")
        pages[pages["scan"]] = unsure
    return ChunkPages(pages, _dictionary_before(source, chunk, places), scanned)


def _by_headers(
    source: ByteSource, chunk: ColumnChunk, column: Column, places: OffsetIndex | None, limit: int, documents: bool
) -> ChunkPages | None:
    """From the page headers, and levels where needed; None where a page cannot be decoded by itself."""
    if places is None:
        walked = walk_pages(source, chunk, limit)
        headers = walked[is_data(walked)]
        dictionary = _dictionary_among(walked)
    else:
        headers = headers_at(source, places.offsets, limit)
        dictionary = _dictionary_before(source, chunk, places)
    _check_headers(headers, column)
    if any((column.physical, encoding) not in DECODERS for encoding in np.unique(headers["encoding"]).tolist()):
        return None
    levels = headers["num_values"]
    if levels.sum() != chunk.num_values:
        raise MalformedError(f"its pages have {levels.sum()} values, its metadata says {chunk.num_values}")
    pages = np.zeros(len(headers), PAGE_DTYPE)
    for name in ("offset", "encoding", "decoded_bytes"):
        pages[name] = headers[name]
    pages["stored_bytes"] = headers["header_bytes"] + headers["stored_bytes"]
    is_full = _is_full(chunk, column)
    if is_full:
        known_rows = levels if column.max_rep == 0 else places.rows if places is not None else None
        count_full(pages, levels, known_rows)
    scanned = 0
    if not is_full or (documents and pages["scan"].any()):
        scanned = scan(source, headers, chunk.codec, column, pages)
    return ChunkPages(pages, dictionary, scanned)


def _by_row_group(source: ByteSource, chunk: ColumnChunk, column: Column) -> ChunkPages:
    """The whole chunk as one page, read through pyarrow."""
    if max(chunk.stored_bytes, chunk.decoded_bytes) > MAX_BYTES:
        raise UnsupportedError(
            "its pages can only be read all together, but are more than 4 GiB; write smaller row groups"
        )
    _, pieces = read_row_group(source, column, chunk.row_group)
    pages = np.zeros(1, PAGE_DTYPE)
    pages["offset"], pages["stored_bytes"], pages["encoding"] = chunk.start, chunk.stored_bytes, BY_ROW_GROUP
    pages["decoded_bytes"] = chunk.decoded_bytes
    count_pieces(pages[0], pieces)
    return ChunkPages(pages, NO_DICTIONARY, chunk.stored_bytes)


def _check_headers(headers: Headers, column: Column) -> None:
    """Raises MalformedError, UnsupportedError."""
    if not is_data(headers).all():
        raise MalformedError("its OffsetIndex points at a page that is not of data")
    check_level_encodings(headers, column)


def _is_full(chunk: ColumnChunk, column: Column) -> bool:
    """Whether the metadata proves that each level is a token. A list's null_count does not: empty lists may be left out."""
    if column.max_def == 0:
        return True
    if column.max_rep == 0 and chunk.null_count == 0:
        return True
    return chunk.level_histogram == (column.max_def + 1, chunk.num_values)


def _only_encoding(chunk: ColumnChunk, column: Column) -> int | None:
    """The encoding of all data pages; None where there are several, or one that takes a look at the headers."""
    old_levels = column.max_def > 0 and Encoding.BIT_PACKED in chunk.encodings
    if old_levels or chunk.page_encodings is None or len(chunk.page_encodings) != 1:
        return None
    return chunk.page_encodings[0] if (column.physical, chunk.page_encodings[0]) in DECODERS else None


def _read_offset_index(source: ByteSource, chunk: ColumnChunk, limit: int) -> OffsetIndex | None:
    if chunk.offset_index is None:
        return None
    offset, size = chunk.offset_index
    with source.blamed(offset, f"the OffsetIndex of row group {chunk.row_group}"):
        data = source.read(offset, size, "the OffsetIndex")
        places = parse_offset_index(data, start=chunk.start, end=limit, num_rows=chunk.num_rows)
        if not len(places.offsets):
            raise MalformedError(f"it lists no pages for {chunk.num_values} values")
        return places


def _read_column_index(source: ByteSource, chunk: ColumnChunk, column: Column, num_pages: int) -> ColumnIndex | None:
    if chunk.column_index is None:
        return None
    offset, size = chunk.column_index
    with source.blamed(offset, f"the ColumnIndex of row group {chunk.row_group}"):
        data = source.read(offset, size, "the ColumnIndex")
        return parse_column_index(data, num_pages=num_pages, max_def=column.max_def, max_rep=column.max_rep)


def _dictionary_before(source: ByteSource, chunk: ColumnChunk, places: OffsetIndex) -> tuple[int, int]:
    """The dictionary page between the chunk's start and its first data page: the OffsetIndex does not list it."""
    first = int(places.offsets[0])
    if chunk.start == first:
        return NO_DICTIONARY
    return _dictionary_among(headers_at(source, np.array([chunk.start]), first))


def _dictionary_among(headers: Headers) -> tuple[int, int]:
    """Offset and stored size of the first dictionary page."""
    for header in headers[headers["type"] == PageType.DICTIONARY][:1]:
        return int(header["offset"]), int(header["header_bytes"] + header["stored_bytes"])
    return NO_DICTIONARY


def _check_sums(pages: Pages, chunk: ColumnChunk, column: Column) -> None:
    """The pages together must be what the metadata of chunk and row group says."""
    if len(pages) and pages["continues"][0]:
        raise MalformedError("its first page begins in the middle of a row")
    rows = int(pages["rows"].sum())
    if (pages["rows"] >= 0).all() and rows != chunk.num_rows:
        raise MalformedError(f"its pages have {rows} rows, its row group {chunk.num_rows}")
    if chunk.level_histogram is not None and chunk.level_histogram[0] == column.max_def + 1:
        tokens, expected = int(pages["tokens"].sum()), chunk.level_histogram[1]
        if tokens != expected:
            raise MalformedError(f"its pages have {tokens} tokens, its metadata says {expected}")
