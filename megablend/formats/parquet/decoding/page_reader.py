"""Decoding pages to tokens, many at a time: one kernel call each for headers,
bodies, levels and values.

PLAIN tokens stay in the buffer that their page was decompressed to;
no block keeps another block's bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.formats.base import STARTS_MID_DOCUMENT, Array, DecodedBlock
from megablend.formats.blocks import join_tables
from megablend.formats.decoded import KINDS, DecodedBlocks, address_of
from megablend.formats.fetch import FileRead
from megablend.formats.parquet.decoding.bodies import UNCOMPRESSED, bodies_of, check_crc
from megablend.formats.parquet.decoding.codecs import decompress
from megablend.formats.parquet.decoding.dictionaries import CACHE, READERS
from megablend.formats.parquet.decoding.headers import headers_in, is_data
from megablend.formats.parquet.decoding.levels import (
    Levels,
    check_level_encodings,
    check_levels,
    levels_of,
)
from megablend.formats.parquet.decoding.row_group import read_row_group
from megablend.formats.parquet.decoding.values import (
    BY_ROW_GROUP,
    Encoded,
    is_by_dictionary,
    plain_values,
    tokens_of,
)
from megablend.formats.parquet.metadata.names import Encoding, name_of
from megablend.formats.parquet.metadata.page_header import parse_page_header
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import MalformedError
from megablend.kernels.parquet.levels import NONE
from megablend.kernels.parquet.page_headers import DATA, DICTIONARY, Headers
from megablend.storage.base import Bytes
from megablend.storage.ranges import FetchedRanges, FileRanges


class SelectedBlocks(NamedTuple):
    """Blocks in the order of the file, each once."""

    pages: Array
    """PLACED_BLOCK_DTYPE [num_pages]"""
    groups: Array
    """PLACED_BLOCK_DTYPE [num_groups], column chunks that pyarrow reads whole."""
    places: Int64s
    """int64 [n], for each requested block its position in pages followed by groups."""


def select_blocks(blocks: Array) -> SelectedBlocks:
    """Sort blocks PLACED_BLOCK_DTYPE [n] into the order in which they are read."""
    offsets = blocks["offset"]
    if (offsets[1:] > offsets[:-1]).all():  # as they are mostly requested
        wanted = blocks
        places = np.arange(len(blocks))
    else:
        firsts, places = _in_file_order(offsets)
        wanted = blocks[firsts]
    encodings = wanted["encoding"]
    if BY_ROW_GROUP not in encodings.tolist():  # of a few pages, faster than a comparison
        return SelectedBlocks(wanted, wanted[:0], places)
    is_group = encodings == BY_ROW_GROUP
    return SelectedBlocks(
        wanted[~is_group], wanted[is_group], np.argsort(np.argsort(is_group, kind="stable"))[places]
    )


def places_of(blocks: Array) -> tuple[Int64s, Int64s]:
    """Offsets of blocks in the file, and their sizes: int64 [n] each."""
    return np.ascontiguousarray(blocks["offset"]), blocks["stored_bytes"].astype(np.int64)


def _in_file_order(offsets: Int64s) -> tuple[Int64s, Int64s]:
    """First occurrence of each of `offsets` int64 [n], ascending, and each one's position among
    these: np.unique, but faster."""
    order = np.argsort(offsets, kind="stable")
    ascending = offsets[order]
    is_new = np.ones(len(order), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    places = np.empty(len(order), np.int64)
    places[order] = np.cumsum(is_new) - 1
    return order[is_new], places


RLE = int(Encoding.RLE)
"""As a plain integer: NumPy compares arrays with enum members slowly."""


class _StoredPages(NamedTuple):
    """Pages of a file, in its order, and what was fetched of it."""

    reader: ParquetReader
    blocks: Array
    """PLACED_BLOCK_DTYPE [n]."""
    chunks: Array
    fetched: FetchedRanges
    dictionaries: Sequence[FetchedRanges]


class ParquetReader:
    """Reads pages of one column of one file."""

    def __init__(self, source: FileBytes, column: Column) -> None:
        self._source = source
        self._column = column
        self._dtype = np.dtype(column.dtype)
        self._number = next(READERS)

    def __reduce__(self) -> tuple[type[ParquetReader], tuple[FileBytes, Column]]:
        return ParquetReader, (self._source, self._column)

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> list[FileRanges]:
        """Pages, and the dictionaries that are not cached; see `BlockReader.byte_ranges`.
        Raises CorruptFileError.

        Levels are stored within the pages, so finding documents needs whole pages, too.
        """
        if fetched or not len(blocks):
            return []
        path = self._source.path
        selected = select_blocks(blocks)
        found = list[FileRanges]()
        for rows, what in ((selected.pages, "the page"), (selected.groups, "the column chunk")):
            if len(rows):
                found.append(FileRanges(path, *places_of(rows)))
                self._source.check_ranges(found[-1].offsets, found[-1].sizes, what)
        needed = set(selected.pages["chunk"][is_by_dictionary(selected.pages["encoding"])].tolist())
        for chunk in chunks[sorted(needed)] if needed else ():
            place = (
                chunk["dictionary_offset"].reshape(1),
                chunk["dictionary_bytes"].reshape(1).astype(np.int64),
            )
            if place[0][0] >= 0 and (self._number, int(place[0][0])) not in CACHE:
                self._source.check_ranges(*place, "the dictionary page")
                found.append(FileRanges(path, *place, is_shared=True))
        return found

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> DecodedBlocks:
        """See `BlockReader.decode`. Raises CorruptFileError, UnsupportedFileError."""
        selected = select_blocks(blocks)
        others = list(fetched)
        parts = list[DecodedBlocks]()
        pages = others.pop(0) if len(selected.pages) else None
        groups = others.pop(0) if len(selected.groups) else None
        if pages is not None:
            parts.append(
                self._decode_pages(
                    [_StoredPages(self, selected.pages, chunks, pages, others)], pieces=pieces
                )
            )
        if groups is not None:
            parts.append(
                DecodedBlocks.of(
                    [
                        self._decode_group(block, chunks, groups[i])
                        for i, block in enumerate(selected.groups)
                    ]
                )
            )
        decoded = DecodedBlocks.joined(parts)
        return decoded if selected.pages is blocks else decoded.taken(selected.places)

    @property
    def alike(self) -> Hashable:
        """See `JointReader.alike`."""
        column = self._column
        return column.physical, column.dtype, column.max_def, column.max_rep

    def decode_jointly(self, reads: Sequence[FileRead], *, pieces: bool) -> DecodedBlocks | None:
        """See `JointReader.decode_jointly`: of pages in the order of their files."""
        stored = list[_StoredPages]()
        for each in reads:
            if select_blocks(each.blocks).pages is not each.blocks:
                return None
            assert isinstance(each.reader, ParquetReader)
            stored.append(
                _StoredPages(
                    each.reader, each.blocks, each.chunks, each.fetched[0], each.fetched[1:]
                )
            )
        return self._decode_pages(stored, pieces=pieces)

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[Int64s], int]:
        """See `BlockReader.find_pieces`."""
        stored_bytes = int(blocks["stored_bytes"].sum(dtype=np.int64))
        return [block.offsets for block in self.decode(blocks, chunks, fetched)], stored_bytes

    def _decode_group(self, block: np.void, chunks: Array, stored: Bytes) -> DecodedBlock:
        """A block that is a whole chunk, through pyarrow."""
        offset = int(block["offset"])
        with self._source.error_context(offset, "the page"):
            row_group = int(chunks[block["chunk"]]["row_group"])
            tokens, offsets = read_row_group(
                self._source, self._column, row_group, {offset: stored}
            )
            _check_counts(block, len(tokens), len(offsets) - 1, continues=False)
        offsets.setflags(write=False)
        return DecodedBlock(tokens, offsets)

    def _decode_pages(self, stored: Sequence[_StoredPages], *, pieces: bool) -> DecodedBlocks:
        """Pages of files whose columns are alike; errors name this reader's.
        Raises CorruptFileError, UnsupportedFileError."""
        source = self._source
        column = self._column
        blocks = stored[0].blocks
        if len(stored) > 1:
            blocks = join_tables([each.blocks for each in stored], blocks.dtype)
        offsets, sizes = places_of(blocks)
        addresses = np.concatenate(
            [address_of(each.fetched.buffers[0]) + each.fetched.begins for each in stored]
        )
        codecs = np.concatenate([each.chunks["codec"][each.blocks["chunk"]] for each in stored])
        headers = headers_in(source, offsets, sizes, addresses)
        self._check_headers(headers, blocks)
        bodies = bodies_of(source, headers, codecs, addresses + headers["header_bytes"])
        num_pieces = None
        if pieces:
            continues = (blocks["flags"] & STARTS_MID_DOCUMENT) > 0
            num_pieces = np.where(blocks["rows"] >= 0, blocks["rows"] + continues, -1)
        levels, piece_offsets, first = levels_of(
            headers, bodies.levels, bodies.level_sizes, column, num_pieces
        )
        self._check(blocks, levels)
        # V2 values are separate from the levels
        value_begins = np.where(headers["type"] == DATA, levels["begin"], 0)
        encoded = Encoded(
            offsets,
            bodies.owners,
            bodies.values + value_begins,
            bodies.value_sizes - value_begins,
            levels["tokens"],
            headers["encoding"],
            [array for each in stored for array in each.reader._dictionaries(each)],
        )
        owners, tokens = tokens_of(source, encoded, column.physical, self._dtype)
        kinds = np.full(len(blocks), KINDS[self._dtype], np.int8)
        found = _cut(piece_offsets, first) if pieces else None
        return DecodedBlocks(owners, kinds, levels["tokens"].copy(), tokens, found)

    def _check_headers(self, headers: Headers, blocks: Array) -> None:
        """Check that they are headers of data pages with the sizes in the index."""
        for i in ((headers["def_encoding"] != RLE) | (headers["rep_encoding"] != RLE)).nonzero()[0]:
            with self._source.error_context(int(headers["offset"][i]), "the page"):
                check_level_encodings(headers[i : i + 1], self._column)
        self._check_encodings(headers, blocks)
        left = blocks["stored_bytes"] - headers["header_bytes"]
        has_data = is_data(headers)
        for i in (~has_data | (left != headers["stored_bytes"])).nonzero()[0]:
            with self._source.error_context(int(headers["offset"][i]), "the page"):
                if not has_data[i]:
                    raise MalformedError(
                        f"it is a page of type {headers['type'][i]}, not a data page"
                    )
                _check_body(int(headers["stored_bytes"][i]), int(left[i]))

    def _check_encodings(self, headers: Headers, blocks: Array) -> None:
        """Check that values are encoded as they were when they were indexed; the two dictionary
        encodings are equivalent."""
        found = headers["encoding"]
        expected = blocks["encoding"]
        if not (found != expected).any():
            return
        by_dictionary = is_by_dictionary(found) & is_by_dictionary(expected)
        for i in (is_data(headers) & (found != expected) & ~by_dictionary).nonzero()[0]:
            with self._source.error_context(int(headers["offset"][i]), "the page"):
                raise MalformedError(
                    f"its values have encoding {name_of(Encoding, int(found[i]))}, but the index records "
                    f"{name_of(Encoding, int(expected[i]))}"
                )

    def _check(self, blocks: Array, levels: Levels) -> None:
        """Check that levels are valid and agree with the index."""
        rows = levels["pieces"] - levels["continues"]
        continues = (blocks["flags"] & STARTS_MID_DOCUMENT) > 0
        wrong = (levels["problem"] != NONE) | (levels["tokens"] != blocks["tokens"])
        wrong |= (blocks["rows"] >= 0) & (
            (rows != blocks["rows"]) | (levels["continues"] != continues)
        )
        for i in wrong.nonzero()[0]:
            with self._source.error_context(int(blocks["offset"][i]), "the page"):
                check_levels(levels[i], self._column)
                _check_counts(
                    blocks[i],
                    int(levels["tokens"][i]),
                    int(rows[i]),
                    continues=bool(levels["continues"][i]),
                )

    def _dictionaries(self, pages: _StoredPages) -> list[Array | None]:
        """The dictionary of each page, int32 or int64 [num_entries];
        None if it has none or needs none."""
        found = list[Array | None]([None] * len(pages.blocks))
        needed = is_by_dictionary(pages.blocks["encoding"]).nonzero()[0]
        if len(needed):
            stored = {int(each.ranges.offsets[0]): each[0] for each in pages.dictionaries}
            places = pages.blocks["chunk"][needed].tolist()
            by_chunk = {
                place: self._dictionary(pages.chunks[place], stored)
                for place in sorted(set(places))
            }
            for i, place in zip(needed.tolist(), places, strict=True):
                found[i] = by_chunk[place]
        return found

    def _dictionary(self, chunk: np.void, stored: Mapping[int, Bytes]) -> Array | None:
        """The dictionary of a chunk, int32 or int64 [num_entries]; None if it has none.

        Args:
            stored: dictionary pages that were fetched, by their offset.
        """
        offset = int(chunk["dictionary_offset"])
        size = int(chunk["dictionary_bytes"])
        codec = int(chunk["codec"])
        if offset < 0:
            return None

        def decode() -> Array:
            if offset in stored:
                return self._decode_dictionary(offset, codec, stored[offset].data)
            # It was evicted after the pages were requested; or the page's header contradicts the
            # index.
            return self._decode_dictionary(
                offset, codec, memoryview(self._source.read(offset, size, "the dictionary page"))
            )

        return CACHE.get((self._number, offset), decode)

    def _decode_dictionary(self, offset: int, codec: int, page: memoryview) -> Array:
        with self._source.error_context(offset, "the dictionary page"):
            header = parse_page_header(page)
            if header.type != DICTIONARY:
                raise MalformedError(f"it is a page of type {header.type}, not a dictionary page")
            body = page[header.header_bytes :]
            _check_body(header.stored_bytes, len(body))
            if header.crc is not None:
                check_crc(header.crc, body)
            values = decompress(codec, body, header.decoded_bytes)
            found: Array = plain_values(values, header.num_values, self._column.physical)
            # A view of what was fetched, which may have other pages' bytes, too
            if codec == UNCOMPRESSED:
                found = found.copy()
            found.setflags(write=False)
            return found


def _cut(offsets: Int64s, first: Int64s) -> list[Int64s]:
    """The offsets of each page, as separate arrays."""
    found = []
    for low, high in itertools.pairwise(first.tolist()):
        found.append(offsets[low:high].copy())
        found[-1].setflags(write=False)
    return found


def _check_body(size: int, expected: int) -> None:
    if size != expected:
        raise MalformedError(f"its body has {size} bytes, but the index records {expected}")


def _check_counts(block: np.void, tokens: int, rows: int, *, continues: bool) -> None:
    if tokens != block["tokens"]:
        raise MalformedError(f"it has {tokens} tokens, but the index records {block['tokens']}")
    if block["rows"] >= 0 and (rows, continues) != (
        block["rows"],
        bool(block["flags"] & STARTS_MID_DOCUMENT),
    ):
        begins = "in the middle of a row" if continues else "with a row"
        raise MalformedError(
            f"it begins {begins} and {rows} rows begin in it, which differs from the index"
        )
