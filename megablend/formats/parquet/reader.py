"""Pages to tokens, many at a time: fetched by few reads, their headers and levels read by one kernel call each.

Tokens stored as they are, are views of what was read or decompressed for their page alone; no block keeps another one's bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.formats.base import CONTINUES, Array, DecodedBlock
from megablend.formats.parquet.codecs import Buffer, decompress
from megablend.formats.parquet.decode import BY_ROW_GROUP, DICTIONARY_ENCODINGS, copied, decode_values, plain_values
from megablend.formats.parquet.dictionaries import CACHE, READERS
from megablend.formats.parquet.headers import headers_in
from megablend.formats.parquet.names import CodecId, Encoding
from megablend.formats.parquet.page import Levels, check_crc, check_level_encodings, check_levels, levels_of, split_body
from megablend.formats.parquet.page_header import parse_page_header
from megablend.formats.parquet.ranges import plan_reads
from megablend.formats.parquet.row_group import read_row_group
from megablend.formats.parquet.schema import Column
from megablend.formats.parquet.source import ByteSource
from megablend.formats.parquet.thrift import MalformedError
from megablend.kernels.levels import NONE
from megablend.kernels.page_headers import DATA, DATA_V2, DICTIONARY, Headers

UNCOMPRESSED, PLAIN, RLE = int(CodecId.UNCOMPRESSED), int(Encoding.PLAIN), int(Encoding.RLE)
"""As plain numbers: NumPy compares arrays with members of an enum slowly."""
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

    def read(self, blocks: Array, chunks: Array) -> list[DecodedBlock]:
        """Decode blocks; see `BlockReader.read`. Raises CorruptFileError, UnsupportedFileError."""
        wanted = blocks[np.unique(blocks["offset"], return_index=True)[1]]
        is_group = wanted["encoding"] == BY_ROW_GROUP
        decoded = {int(block["offset"]): self._read_group(block, chunks) for block in wanted[is_group]}
        pages = wanted[~is_group]
        batches = (np.cumsum(pages["decoded_bytes"], dtype=np.int64) - 1) // BATCH_BYTES
        bounds = [0, *(np.flatnonzero(np.diff(batches)) + 1).tolist(), len(pages)]
        for begin, end in itertools.pairwise(bounds):
            part = pages[begin:end]
            decoded |= zip(part["offset"].tolist(), self._read_pages(part, chunks), strict=True)
        return [decoded[offset] for offset in blocks["offset"].tolist()]

    def pieces(self, blocks: Array, chunks: Array) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See `BlockReader.pieces`. Levels lie within the pages, so these are read whole."""
        return [block.offsets for block in self.read(blocks, chunks)], int(blocks["stored_bytes"].sum(dtype=np.int64))

    def _read_group(self, block: np.void, chunks: Array) -> DecodedBlock:
        """A block that is a whole chunk, through pyarrow."""
        with self._source.blamed(int(block["offset"]), "the page"):
            tokens, pieces = read_row_group(self._source, self._column, int(chunks[block["chunk"]]["row_group"]))
            _check_counts(block, pieces.num_tokens, pieces.num_rows, pieces.continues)
        pieces.offsets.setflags(write=False)
        return DecodedBlock(tokens, pieces.offsets)

    def _read_pages(self, blocks: Array, chunks: Array) -> list[DecodedBlock]:
        """Blocks that are pages, in the order of the file."""
        source, column = self._source, self._column
        pages, addresses, alone = self._fetch(blocks)
        headers = headers_in(source, blocks["offset"], pages, addresses)
        codecs = chunks["codec"][blocks["chunk"]]
        bodies = self._split(headers, pages, codecs.tolist())
        is_counted = blocks["rows"] >= 0
        continues = (blocks["flags"] & CONTINUES) > 0
        num_pieces = np.where(is_counted, blocks["rows"] + continues, -1)
        levels, offsets, first = levels_of(headers, [front for front, _ in bodies], column, num_pieces)
        self._check(blocks, levels)

        # V1 values follow the levels; those of V2 have been split from them.
        begins = np.where(headers["type"] == DATA, levels["begin"], 0)
        is_view = ((codecs == UNCOMPRESSED) | ~headers["is_compressed"]) & (headers["encoding"] == PLAIN)
        fields = [
            blocks["offset"],
            begins,
            levels["tokens"],
            headers["encoding"],
            is_view & ~alone,
            first[:-1],
            first[1:],
        ]
        decoded = []
        with source.blamed(0, "the page") as place:
            for chunk, (_, values), place.offset, begin, count, encoding, is_shared, low, high in zip(
                blocks["chunk"], bodies, *map(np.ndarray.tolist, fields), strict=True
            ):
                dictionary = self._dictionary(chunks[chunk]) if encoding in DICTIONARY_ENCODINGS else None
                tokens = decode_values(values, begin, count, column.physical, encoding, self._dtype, dictionary)
                if is_shared:
                    tokens = copied(tokens)
                pieces = offsets[low:high].copy()
                pieces.setflags(write=False)
                decoded.append(DecodedBlock(tokens, pieces))
        return decoded

    def _fetch(self, blocks: Array) -> tuple[list[memoryview], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Pages; where they lie in memory, uint64 [n]; whether they were read alone, bool [n]."""
        offsets, sizes = blocks["offset"].tolist(), blocks["stored_bytes"].tolist()
        runs = plan_reads(offsets, sizes, sizes)
        found = self._source.read_ranges([(start, stop - start) for _, start, stop in runs], "a run of pages")
        pages, addresses, alone = [], [], []
        for (run, start, _), data in zip(runs, found, strict=True):
            address = pa.py_buffer(data).address
            for i in run:
                begin = offsets[i] - start
                pages.append(data[begin : begin + sizes[i]])
                addresses.append(address + begin)
                alone.append(len(run) == 1)
        return pages, np.array(addresses, np.uint64), np.array(alone, bool)

    def _split(self, headers: Headers, pages: Sequence[memoryview], codecs: list[int]) -> list[tuple[Buffer, Buffer]]:
        """Checksums compared, bodies decompressed: what begins with the levels of each page, and what holds its values."""
        for i in np.flatnonzero((headers["def_encoding"] != RLE) | (headers["rep_encoding"] != RLE)):
            with self._source.blamed(int(headers["offset"][i]), "the page"):
                check_level_encodings(headers[i : i + 1], self._column)
        names = ("offset", "header_bytes", "stored_bytes", "type", "has_crc", "crc", "is_compressed", "decoded_bytes")
        fields = [headers[name].tolist() for name in names]
        level_bytes = (headers["rep_bytes"] + headers["def_bytes"]).tolist()
        found = []
        with self._source.blamed(0, "the page") as place:
            for page, codec, in_front, place.offset, size, stored, kind, has_crc, crc, is_compressed, decoded in zip(
                pages, codecs, level_bytes, *fields, strict=True
            ):
                if kind not in (DATA, DATA_V2):
                    raise MalformedError(f"it is a page of type {kind}, not of data")
                body = body_of(page, size, stored)
                if has_crc:
                    check_crc(crc, body)
                found.append(split_body(kind, in_front, is_compressed, decoded, body, codec))
        return found

    def _check(self, blocks: Array, levels: Levels) -> None:
        """Levels must be sound, and say what the index says."""
        rows = levels["pieces"] - levels["continues"]
        continues = (blocks["flags"] & CONTINUES) > 0
        wrong = (levels["problem"] != NONE) | (levels["tokens"] != blocks["tokens"])
        wrong |= (blocks["rows"] >= 0) & ((rows != blocks["rows"]) | (levels["continues"] != continues))
        for i in np.flatnonzero(wrong):
            with self._source.blamed(int(blocks["offset"][i]), "the page"):
                check_levels(levels[i], self._column)
                _check_counts(blocks[i], int(levels["tokens"][i]), int(rows[i]), bool(levels["continues"][i]))

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
        with self._source.blamed(offset, "the dictionary page"):
            header = parse_page_header(page)
            if header.type != DICTIONARY:
                raise MalformedError(f"it is a page of type {header.type}")
            body = body_of(page, header.header_bytes, header.stored_bytes)
            if header.crc is not None:
                check_crc(header.crc, body)
            values = decompress(codec, body, header.decoded_bytes)
            found: Array = plain_values(values, 0, header.num_values, self._column.physical).copy()
            found.setflags(write=False)
            return found


def body_of(page: memoryview, header_bytes: int, stored_bytes: int) -> memoryview:
    """The body of a page that the index holds to be of this size. Raises MalformedError."""
    body = page[header_bytes:]
    if len(body) != stored_bytes:
        raise MalformedError(f"its body is of {stored_bytes} bytes, the index says {len(body)}")
    return body


def _check_counts(block: np.void, tokens: int, rows: int, continues: bool) -> None:
    if tokens != block["tokens"]:
        raise MalformedError(f"it has {tokens} tokens, the index says {block['tokens']}")
    if block["rows"] >= 0 and (rows, continues) != (block["rows"], bool(block["flags"] & CONTINUES)):
        begins = "in the middle of a row" if continues else "with a row"
        raise MalformedError(f"it begins {begins} and {rows} rows begin in it, the index says otherwise")
