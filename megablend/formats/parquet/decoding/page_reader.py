"""Decode pages to tokens, many at a time: one kernel call each for headers, bodies, levels and
values.

PLAIN tokens stay in the buffer to which their page was decompressed. No block keeps the bytes of
another block in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import numpy as np

from megablend.arrays import Int64s
from megablend.formats.base import STARTS_MID_DOCUMENT, Array
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
from megablend.formats.parquet.decoding.values import (
    Encoded,
    is_by_dictionary,
    plain_values,
    tokens_of,
)
from megablend.formats.parquet.metadata.names import Encoding, name_of
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import MalformedError
from megablend.kernels.parquet.levels import NONE
from megablend.kernels.parquet.page_headers import DATA, DICTIONARY, Headers
from megablend.storage.base import Bytes
from megablend.storage.ranges import FetchedRanges, FileRanges

RLE = int(Encoding.RLE)
"""A plain integer, since NumPy compares arrays with members of an enum slowly."""


def select_blocks(blocks: Array) -> tuple[Array, Int64s]:
    """Return the distinct blocks among `blocks`, PLACED_BLOCK_DTYPE [n], in file order, and the
    position of each of `blocks` among them, int64 [n]."""
    offsets = blocks["offset"]
    # Most requests are in the order of the file already
    if (offsets[1:] > offsets[:-1]).all():
        return blocks, np.arange(len(blocks))
    firsts, positions = _in_file_order(offsets)
    return blocks[firsts], positions


def places_of(blocks: Array) -> tuple[Int64s, Int64s]:
    """Return the offsets of blocks in the file, and their sizes in bytes: arrays of int64 [n]."""
    return np.ascontiguousarray(blocks["offset"]), blocks["stored_bytes"].astype(np.int64)


def _in_file_order(offsets: Int64s) -> tuple[Int64s, Int64s]:
    """Find the distinct values of `offsets`, int64 [n], like np.unique but faster.

    Returns: for each distinct offset, in ascending order, the index of its first occurrence; and
        for each of `offsets` the index of its value among the distinct ones.
    """
    order = np.argsort(offsets, kind="stable")
    ascending = offsets[order]
    is_new = np.ones(len(order), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    positions = np.empty(len(order), np.int64)
    positions[order] = np.cumsum(is_new) - 1
    return order[is_new], positions


class ParquetReader:
    """A reader that decodes the pages of one column of a Parquet file."""

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
        """Return the ranges of pages, and of dictionaries that are not cached; see
        `BlockReader.byte_ranges`. Raises: CorruptFileError.

        Levels are stored within the pages, so finding documents also needs whole pages.
        """
        if fetched or not len(blocks):
            return []
        path = self._source.path
        pages, _ = select_blocks(blocks)
        ranges = [FileRanges(path, *places_of(pages))]
        self._source.check_ranges(ranges[0].offsets, ranges[0].sizes, "the page")
        by_dictionary = is_by_dictionary(pages["encoding"])
        needed = set(pages["chunk"][by_dictionary].tolist())
        for chunk in chunks[sorted(needed)] if needed else ():
            offset = chunk["dictionary_offset"].reshape(1)
            size = chunk["dictionary_bytes"].reshape(1).astype(np.int64)
            if offset[0] >= 0 and (self._number, int(offset[0])) not in CACHE:
                self._source.check_ranges(offset, size, "the dictionary page")
                ranges.append(FileRanges(path, offset, size, is_shared=True))
        return ranges

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> DecodedBlocks:
        """See `BlockReader.decode`. Raises: CorruptFileError, UnsupportedFileError."""
        if not len(blocks):
            return DecodedBlocks.of([])
        pages, positions = select_blocks(blocks)
        read = FileRead(self, pages, chunks, fetched=list(fetched))
        decoded = self._decode_pages([read], pieces=pieces)
        return decoded if pages is blocks else decoded.taken(positions)

    @property
    def alike(self) -> Hashable:
        """See `JointReader.alike`."""
        column = self._column
        return column.physical, column.dtype, column.max_def, column.max_rep

    def decode_jointly(self, reads: Sequence[FileRead], *, pieces: bool) -> DecodedBlocks | None:
        """See `JointReader.decode_jointly`. Only pages in file order are decoded jointly."""
        if any(select_blocks(read.blocks)[0] is not read.blocks for read in reads):
            return None
        return self._decode_pages(reads, pieces=pieces)

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[Int64s], int]:
        """See `BlockReader.find_pieces`."""
        stored_bytes = int(blocks["stored_bytes"].sum(dtype=np.int64))
        return [block.offsets for block in self.decode(blocks, chunks, fetched)], stored_bytes

    def _decode_pages(self, reads: Sequence[FileRead], *, pieces: bool) -> DecodedBlocks:
        """Decode pages of files whose readers are alike; errors name the file of this reader.

        Args:
            reads: reads whose blocks are in file order. Their bytes are in the order in which
                `byte_ranges` requested them: first those of pages, then those of dictionaries.

        Raises: CorruptFileError, UnsupportedFileError.
        """
        source = self._source
        column = self._column
        blocks = reads[0].blocks
        if len(reads) > 1:
            blocks = join_tables([read.blocks for read in reads], blocks.dtype)
        offsets, sizes = places_of(blocks)
        addresses_by_read = list[Int64s]()
        codecs_by_read = list[Array]()
        for read in reads:
            pages = read.fetched[0]
            addresses_by_read.append(address_of(pages.buffers[0]) + pages.begins)
            codecs_by_read.append(read.chunks["codec"][read.blocks["chunk"]])
        addresses = np.concatenate(addresses_by_read)
        codecs = np.concatenate(codecs_by_read)
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
            [dictionary for read in reads for dictionary in _find_dictionaries(read)],
        )
        owners, tokens = tokens_of(source, encoded, column.physical, self._dtype)
        kinds = np.full(len(blocks), KINDS[self._dtype], np.int8)
        block_offsets = _cut(piece_offsets, first) if pieces else None
        return DecodedBlocks(owners, kinds, levels["tokens"].copy(), tokens, block_offsets)

    def _check_headers(self, headers: Headers, blocks: Array) -> None:
        """Check that headers belong to data pages, and state the sizes and encodings that are in
        the index; the two dictionary encodings count as the same. Raises: CorruptFileError,
        UnsupportedFileError."""
        for i in ((headers["def_encoding"] != RLE) | (headers["rep_encoding"] != RLE)).nonzero()[0]:
            with self._source.error_context(int(headers["offset"][i]), "the page"):
                check_level_encodings(headers[i : i + 1], self._column)
        has_data = is_data(headers)
        encodings = headers["encoding"]
        expected = blocks["encoding"]
        differs = encodings != expected
        if differs.any():
            by_dictionary = is_by_dictionary(encodings) & is_by_dictionary(expected)
            for i in (has_data & differs & ~by_dictionary).nonzero()[0]:
                with self._source.error_context(int(headers["offset"][i]), "the page"):
                    raise MalformedError(
                        f"its values have encoding {name_of(Encoding, int(encodings[i]))}, but the index records "
                        f"{name_of(Encoding, int(expected[i]))}"
                    )
        body_bytes = blocks["stored_bytes"] - headers["header_bytes"]
        for i in (~has_data | (body_bytes != headers["stored_bytes"])).nonzero()[0]:
            with self._source.error_context(int(headers["offset"][i]), "the page"):
                if not has_data[i]:
                    raise MalformedError(
                        f"it is a page of type {headers['type'][i]}, not a data page"
                    )
                _check_body(int(headers["stored_bytes"][i]), int(body_bytes[i]))

    def _check(self, blocks: Array, levels: Levels) -> None:
        """Check that the levels of blocks are valid, and agree with the index. Raises:
        CorruptFileError."""
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

    def _decode_dictionary(self, chunk: np.void, stored: Mapping[int, Bytes]) -> Array:
        """Decode the dictionary of a chunk: int32 or int64 [num_entries].

        Args:
            stored: the dictionary pages that were fetched, by their offsets.
        """
        what = "the dictionary page"
        offset = int(chunk["dictionary_offset"])
        page = stored.get(offset)
        if page is None:
            # The dictionary was in the cache when the pages were requested, and has been evicted
            # since; or a page's header contradicts the index
            size = int(chunk["dictionary_bytes"])
            page = np.frombuffer(self._source.read(offset, size, what), np.uint8)
        (header,) = headers_in(
            self._source,
            np.array([offset]),
            np.array([len(page)]),
            np.array([address_of(page)]),
            what,
        )
        with self._source.error_context(offset, what):
            if header["type"] != DICTIONARY:
                raise MalformedError(
                    f"it is a page of type {header['type']}, not a dictionary page"
                )
            body = page.data[header["header_bytes"] :]
            _check_body(int(header["stored_bytes"]), len(body))
            if header["has_crc"]:
                check_crc(int(header["crc"]), body)
            codec = int(chunk["codec"])
            values = decompress(codec, body, int(header["decoded_bytes"]))
            dictionary = plain_values(values, int(header["num_values"]), self._column.physical)
            # A view of the fetched buffer, which may have bytes of other pages, must not be cached
            if codec == UNCOMPRESSED:
                dictionary = dictionary.copy()
            dictionary.setflags(write=False)
            return dictionary


def _find_dictionaries(read: FileRead) -> list[Array | None]:
    """Return the dictionary of each page, int32 or int64 [num_entries], or None if the page is not
    dictionary-encoded or its chunk has no dictionary."""
    reader = read.reader
    assert isinstance(reader, ParquetReader)
    dictionaries = list[Array | None]([None] * len(read.blocks))
    needing = is_by_dictionary(read.blocks["encoding"]).nonzero()[0]
    if not len(needing):
        return dictionaries
    stored = dict[int, Bytes]()
    for page in read.fetched[1:]:
        stored[int(page.ranges.offsets[0])] = page[0]
    numbers = read.blocks["chunk"][needing].tolist()
    by_chunk = dict[int, Array]()
    for number in sorted(set(numbers)):
        chunk = read.chunks[number]
        offset = int(chunk["dictionary_offset"])
        if offset >= 0:
            decode = partial(reader._decode_dictionary, chunk, stored)
            by_chunk[number] = CACHE.get((reader._number, offset), decode)
    for i, number in zip(needing.tolist(), numbers, strict=True):
        dictionaries[i] = by_chunk.get(number)
    return dictionaries


def _cut(offsets: Int64s, first: Int64s) -> list[Int64s]:
    """Copy the piece offsets of each page to a read-only array. `first` has the position of each
    page's first offset."""
    by_page = []
    for low, high in itertools.pairwise(first.tolist()):
        by_page.append(offsets[low:high].copy())
        by_page[-1].setflags(write=False)
    return by_page


def _check_body(size: int, expected: int) -> None:
    if size != expected:
        raise MalformedError(f"its body has {size} bytes, but the index records {expected}")


def _check_counts(block: np.void, tokens: int, rows: int, *, continues: bool) -> None:
    if tokens != block["tokens"]:
        raise MalformedError(f"it has {tokens} tokens, but the index records {block['tokens']}")
    expected = block["rows"], bool(block["flags"] & STARTS_MID_DOCUMENT)
    if block["rows"] >= 0 and (rows, continues) != expected:
        raise MalformedError(
            f"it begins {_describe_begin(continues)}, and {rows} rows begin in it, but according to the index it "
            f"begins {_describe_begin(expected[1])}, and {block['rows']} rows begin in it"
        )


def _describe_begin(continues: bool) -> str:
    return "in the middle of a row" if continues else "with a row"
