"""Pages to tokens, many at a time: fetched by few reads; headers, bodies, levels and values each by one kernel call.

Tokens stored as they are stay where they were decompressed to, for their page alone; no block keeps another one's bytes.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pyarrow as pa

from megablend.formats.base import STARTS_MID_DOCUMENT, Array, DecodedBlock
from megablend.formats.decoded import KINDS, DecodedBlocks
from megablend.formats.parquet.decoding.bodies import bodies_of, check_crc
from megablend.formats.parquet.decoding.codecs import decompress
from megablend.formats.parquet.decoding.dictionaries import CACHE, READERS
from megablend.formats.parquet.decoding.headers import headers_in, is_data
from megablend.formats.parquet.decoding.levels import Levels, check_level_encodings, check_levels, levels_of
from megablend.formats.parquet.decoding.row_group import read_row_group
from megablend.formats.parquet.decoding.values import BY_ROW_GROUP, Encoded, is_by_dictionary, plain_values, tokens_of
from megablend.formats.parquet.metadata.names import Encoding, name_of
from megablend.formats.parquet.metadata.page_header import parse_page_header
from megablend.formats.parquet.metadata.ranges import plan_reads, portions
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import ByteSource
from megablend.formats.parquet.metadata.thrift import MalformedError
from megablend.kernels.parquet.levels import NONE
from megablend.kernels.parquet.page_headers import DATA, DICTIONARY, Headers
from megablend.storage.base import Int64s

RLE = int(Encoding.RLE)
"""As a plain number: NumPy compares arrays with members of an enum slowly."""
BATCH_BYTES = 32 << 20
"""Of blocks, decoded, that are worked on together: what a call needs beyond its result."""


class ParquetReader:
    """Reads pages of one column of one file."""

    def __init__(self, source: ByteSource, column: Column) -> None:
        self._source = source
        self._column = column
        self._dtype = np.dtype(column.dtype)
        self._number = next(READERS)

    def __reduce__(self) -> tuple[type[ParquetReader], tuple[ByteSource, Column]]:
        return ParquetReader, (self._source, self._column)

    def read(self, blocks: Array, chunks: Array, *, pieces: bool = True) -> DecodedBlocks:
        """Decode blocks; see `BlockReader.read`. Raises CorruptFileError, UnsupportedFileError."""
        firsts, places = _in_file_order(blocks["offset"])
        wanted, is_group = blocks[firsts], blocks["encoding"][firsts] == BY_ROW_GROUP
        pages = wanted[~is_group] if is_group.any() else wanted
        batches = portions(pages["decoded_bytes"], BATCH_BYTES)
        parts = [self._read_pages(pages[batch], chunks, pieces=pieces) for batch in batches]
        if is_group.any():
            parts.append(DecodedBlocks.of([self._read_group(block, chunks) for block in wanted[is_group]]))
            places = np.argsort(np.argsort(is_group, kind="stable"))[places]  # the groups are behind the pages now
        return DecodedBlocks.joined(parts).taken(places)

    def pieces(self, blocks: Array, chunks: Array) -> tuple[list[Int64s], int]:
        """See `BlockReader.pieces`. Levels lie within the pages, so these are read whole."""
        return [block.offsets for block in self.read(blocks, chunks)], int(blocks["stored_bytes"].sum(dtype=np.int64))

    def _read_group(self, block: np.void, chunks: Array) -> DecodedBlock:
        """A block that is a whole chunk, through pyarrow."""
        with self._source.error_context(int(block["offset"]), "the page"):
            tokens, offsets = read_row_group(self._source, self._column, int(chunks[block["chunk"]]["row_group"]))
            _check_counts(block, len(tokens), len(offsets) - 1, continues=False)
        offsets.setflags(write=False)
        return DecodedBlock(tokens, offsets)

    def _read_pages(self, blocks: Array, chunks: Array, *, pieces: bool) -> DecodedBlocks:
        """Blocks that are pages, in the order of the file."""
        source, column = self._source, self._column
        data, begins = self._fetch(blocks)
        headers = headers_in(source, blocks["offset"], blocks["stored_bytes"].astype(np.int64), data, begins)
        self._check_headers(headers, blocks)
        bodies = bodies_of(source, headers, chunks["codec"][blocks["chunk"]], data, begins + headers["header_bytes"])
        num_pieces = None
        if pieces:
            continues = (blocks["flags"] & STARTS_MID_DOCUMENT) > 0
            num_pieces = np.where(blocks["rows"] >= 0, blocks["rows"] + continues, -1)
        levels, offsets, first = levels_of(headers, bodies.levels, bodies.level_sizes, column, num_pieces)
        self._check(blocks, levels)
        value_begins = np.where(
            headers["type"] == DATA, levels["begin"], 0
        )  # those of V2 have been split from the levels
        encoded = Encoded(
            blocks["offset"],
            bodies.owners,
            bodies.values + value_begins,
            bodies.value_sizes - value_begins,
            levels["tokens"],
            headers["encoding"],
            self._dictionaries(headers["encoding"], blocks["chunk"], chunks),
        )
        owners, tokens = tokens_of(source, encoded, column.physical, self._dtype)
        kinds = np.full(len(blocks), KINDS[self._dtype], np.int8)
        return DecodedBlocks(owners, kinds, levels["tokens"].copy(), tokens, _cut(offsets, first) if pieces else None)

    def _fetch(self, blocks: Array) -> tuple[pa.Buffer, Int64s]:
        """Pages, in one buffer; where in it each begins, int64 [n]."""
        offsets, sizes = blocks["offset"].tolist(), blocks["stored_bytes"].tolist()
        runs = plan_reads(offsets, sizes, sizes, self._source.limits)
        starts, stops = (np.array([run[i] for run in runs], np.int64) for i in (1, 2))
        data, begins = self._source.read_ranges(starts, stops - starts, "a run of pages")
        shifts = np.repeat(begins - starts, [len(pages) for pages, _, _ in runs])
        return data, blocks["offset"] + shifts

    def _check_headers(self, headers: Headers, blocks: Array) -> None:
        """They must be those of data pages that take the bytes that the index says."""
        for i in np.flatnonzero((headers["def_encoding"] != RLE) | (headers["rep_encoding"] != RLE)):
            with self._source.error_context(int(headers["offset"][i]), "the page"):
                check_level_encodings(headers[i : i + 1], self._column)
        self._check_encodings(headers, blocks)
        left = blocks["stored_bytes"] - headers["header_bytes"]
        has_data = is_data(headers)
        for i in np.flatnonzero(~has_data | (left != headers["stored_bytes"])):
            with self._source.error_context(int(headers["offset"][i]), "the page"):
                if not has_data[i]:
                    raise MalformedError(f"it is a page of type {headers['type'][i]}, not of data")
                _check_body(int(headers["stored_bytes"][i]), int(left[i]))

    def _check_encodings(self, headers: Headers, blocks: Array) -> None:
        """Values must be encoded as they were when they were indexed; the two names of dictionaries mean the same."""
        found, expected = headers["encoding"], blocks["encoding"]
        by_dictionary = is_by_dictionary(found) & is_by_dictionary(expected)
        for i in np.flatnonzero(is_data(headers) & (found != expected) & ~by_dictionary):
            with self._source.error_context(int(headers["offset"][i]), "the page"):
                raise MalformedError(
                    f"its values are of encoding {name_of(Encoding, int(found[i]))}, the index says "
                    f"{name_of(Encoding, int(expected[i]))}"
                )

    def _check(self, blocks: Array, levels: Levels) -> None:
        """Levels must be sound, and say what the index says."""
        rows = levels["pieces"] - levels["continues"]
        continues = (blocks["flags"] & STARTS_MID_DOCUMENT) > 0
        wrong = (levels["problem"] != NONE) | (levels["tokens"] != blocks["tokens"])
        wrong |= (blocks["rows"] >= 0) & ((rows != blocks["rows"]) | (levels["continues"] != continues))
        for i in np.flatnonzero(wrong):
            with self._source.error_context(int(blocks["offset"][i]), "the page"):
                check_levels(levels[i], self._column)
                _check_counts(blocks[i], int(levels["tokens"][i]), int(rows[i]), continues=bool(levels["continues"][i]))

    def _dictionaries(self, encodings: Int64s, places: Array, chunks: Array) -> list[Array | None]:
        """For each page what its indices stand for, int32 or int64 [num_entries]; None where it has none, or has no indices."""
        found = list[Array | None]([None] * len(encodings))
        needed = np.flatnonzero(is_by_dictionary(encodings))
        if len(needed):
            by_chunk = {place: self._dictionary(chunks[place]) for place in sorted(set(places[needed].tolist()))}
            for i in needed.tolist():
                found[i] = by_chunk[int(places[i])]
        return found

    def _dictionary(self, chunk: np.void) -> Array | None:
        """What indices stand for in a chunk, int32 or int64 [num_entries]; None where it has no dictionary."""
        offset = int(chunk["dictionary_offset"])
        if offset < 0:
            return None
        return CACHE.get(
            (self._number, offset),
            partial(self._read_dictionary, offset, int(chunk["dictionary_bytes"]), int(chunk["codec"])),
        )

    def _read_dictionary(self, offset: int, size: int, codec: int) -> Array:
        page = memoryview(self._source.read(offset, size, "the dictionary page"))
        with self._source.error_context(offset, "the dictionary page"):
            header = parse_page_header(page)
            if header.type != DICTIONARY:
                raise MalformedError(f"it is a page of type {header.type}")
            body = page[header.header_bytes :]
            _check_body(header.stored_bytes, len(body))
            if header.crc is not None:
                check_crc(header.crc, body)
            values = decompress(codec, body, header.decoded_bytes)
            found: Array = plain_values(values, header.num_values, self._column.physical).copy()
            found.setflags(write=False)
            return found


def _in_file_order(offsets: Int64s) -> tuple[Int64s, Int64s]:
    """Where each of `offsets` int64 [n] is met first, ascending, and each one's place among these: np.unique, but faster."""
    order = np.argsort(offsets, kind="stable")
    ascending = offsets[order]
    is_new = np.ones(len(order), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    places = np.empty(len(order), np.int64)
    places[order] = np.cumsum(is_new) - 1
    return order[is_new], places


def _cut(offsets: Int64s, first: Int64s) -> list[Int64s]:
    """The offsets of each page, in memory of their own."""
    found = []
    for low, high in itertools.pairwise(first.tolist()):
        found.append(offsets[low:high].copy())
        found[-1].setflags(write=False)
    return found


def _check_body(size: int, expected: int) -> None:
    if size != expected:
        raise MalformedError(f"its body is of {size} bytes, the index says {expected}")


def _check_counts(block: np.void, tokens: int, rows: int, *, continues: bool) -> None:
    if tokens != block["tokens"]:
        raise MalformedError(f"it has {tokens} tokens, the index says {block['tokens']}")
    if block["rows"] >= 0 and (rows, continues) != (block["rows"], bool(block["flags"] & STARTS_MID_DOCUMENT)):
        begins = "in the middle of a row" if continues else "with a row"
        raise MalformedError(f"it begins {begins} and {rows} rows begin in it, the index says otherwise")
