"""Pages to tokens, many at a time: fetched by few reads, their headers and levels read by one kernel call each.

Tokens stored as they are, are views of what was decompressed for their page alone; no block keeps another one's bytes.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pyarrow as pa

from megablend.formats.base import CONTINUES, NO_PIECES, Array, DecodedBlock
from megablend.formats.parquet.codecs import Buffer, decompress
from megablend.formats.parquet.decode import BY_ROW_GROUP, DICTIONARY_ENCODINGS, copied, decode_values, plain_values
from megablend.formats.parquet.dictionaries import CACHE, READERS
from megablend.formats.parquet.headers import headers_in, is_data
from megablend.formats.parquet.names import CodecId, Encoding
from megablend.formats.parquet.page import Levels, check_crc, check_level_encodings, check_levels, levels_of, split_body
from megablend.formats.parquet.page_header import parse_page_header
from megablend.formats.parquet.ranges import plan_reads
from megablend.formats.parquet.row_group import read_row_group
from megablend.formats.parquet.schema import Column
from megablend.formats.parquet.source import ByteSource
from megablend.formats.parquet.thrift import MalformedError
from megablend.kernels.levels import NONE
from megablend.kernels.page_headers import DATA, DICTIONARY, Headers
from megablend.storage.base import Int64s

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

    def read(self, blocks: Array, chunks: Array, *, pieces: bool = True) -> list[DecodedBlock]:
        """Decode blocks; see `BlockReader.read`. Raises CorruptFileError, UnsupportedFileError."""
        wanted = blocks[np.unique(blocks["offset"], return_index=True)[1]]
        is_group = wanted["encoding"] == BY_ROW_GROUP
        decoded = {int(block["offset"]): self._read_group(block, chunks) for block in wanted[is_group]}
        pages = wanted[~is_group]
        batches = (np.cumsum(pages["decoded_bytes"], dtype=np.int64) - 1) // BATCH_BYTES
        bounds = [0, *(np.flatnonzero(np.diff(batches)) + 1).tolist(), len(pages)]
        for begin, end in itertools.pairwise(bounds):
            part = pages[begin:end]
            decoded |= zip(part["offset"].tolist(), self._read_pages(part, chunks, pieces=pieces), strict=True)
        return [decoded[offset] for offset in blocks["offset"].tolist()]

    def pieces(self, blocks: Array, chunks: Array) -> tuple[list[Int64s], int]:
        """See `BlockReader.pieces`. Levels lie within the pages, so these are read whole."""
        return [block.offsets for block in self.read(blocks, chunks)], int(blocks["stored_bytes"].sum(dtype=np.int64))

    def _read_group(self, block: np.void, chunks: Array) -> DecodedBlock:
        """A block that is a whole chunk, through pyarrow."""
        with self._source.blamed(int(block["offset"]), "the page"):
            tokens, pieces = read_row_group(self._source, self._column, int(chunks[block["chunk"]]["row_group"]))
            _check_counts(block, pieces.num_tokens, pieces.num_rows, pieces.continues)
        pieces.offsets.setflags(write=False)
        return DecodedBlock(tokens, pieces.offsets)

    def _read_pages(self, blocks: Array, chunks: Array, *, pieces: bool) -> list[DecodedBlock]:
        """Blocks that are pages, in the order of the file."""
        source, column = self._source, self._column
        data, begins = self._fetch(blocks)
        headers = headers_in(source, blocks["offset"], blocks["stored_bytes"].astype(np.int64), data, begins)
        codecs = chunks["codec"][blocks["chunk"]]
        self._check_headers(headers, blocks)
        bodies = self._split(headers, memoryview(data).cast("B"), begins, codecs)
        num_pieces = None
        if pieces:
            continues = (blocks["flags"] & CONTINUES) > 0
            num_pieces = np.where(blocks["rows"] >= 0, blocks["rows"] + continues, -1)
        levels, offsets, first = levels_of(headers, [front for front, _ in bodies], column, num_pieces)
        self._check(blocks, levels)

        # V1 values follow the levels; those of V2 have been split from them.
        value_begins = np.where(headers["type"] == DATA, levels["begin"], 0)
        is_shared = ((codecs == UNCOMPRESSED) | ~headers["is_compressed"]) & (headers["encoding"] == PLAIN)
        fields = (
            blocks["offset"],
            value_begins,
            levels["tokens"],
            headers["encoding"],
            is_shared,
            first[:-1],
            first[1:],
        )
        decoded = []
        with source.blamed(0, "the page") as place:
            for chunk, (_, values), place.offset, begin, count, encoding, shared, low, high in zip(
                blocks["chunk"].tolist(), bodies, *map(np.ndarray.tolist, fields), strict=True
            ):
                dictionary = self._dictionary(chunks[chunk]) if encoding in DICTIONARY_ENCODINGS else None
                tokens = decode_values(values, begin, count, column.physical, encoding, self._dtype, dictionary)
                if shared:
                    tokens = copied(tokens)
                if not pieces:
                    decoded.append(DecodedBlock(tokens, NO_PIECES))
                    continue
                of_page = offsets[low:high].copy()
                of_page.setflags(write=False)
                decoded.append(DecodedBlock(tokens, of_page))
        return decoded

    def _fetch(self, blocks: Array) -> tuple[pa.Buffer, Int64s]:
        """Pages, in one buffer; where in it each begins, int64 [n]."""
        offsets, sizes = blocks["offset"].tolist(), blocks["stored_bytes"].tolist()
        runs = plan_reads(offsets, sizes, sizes)
        starts, stops = (np.array([run[i] for run in runs], np.int64) for i in (1, 2))
        data, begins = self._source.read_ranges(starts, stops - starts, "a run of pages")
        shifts = np.repeat(begins - starts, [len(pages) for pages, _, _ in runs])
        return data, blocks["offset"] + shifts

    def _check_headers(self, headers: Headers, blocks: Array) -> None:
        """They must be those of data pages that take the bytes that the index says."""
        for i in np.flatnonzero((headers["def_encoding"] != RLE) | (headers["rep_encoding"] != RLE)):
            with self._source.blamed(int(headers["offset"][i]), "the page"):
                check_level_encodings(headers[i : i + 1], self._column)
        left = blocks["stored_bytes"] - headers["header_bytes"]
        for i in np.flatnonzero(~is_data(headers) | (left != headers["stored_bytes"])):
            with self._source.blamed(int(headers["offset"][i]), "the page"):
                if not is_data(headers)[i]:
                    raise MalformedError(f"it is a page of type {headers['type'][i]}, not of data")
                _check_body(int(headers["stored_bytes"][i]), int(left[i]))

    def _split(self, headers: Headers, data: memoryview, begins: Int64s, codecs: Array) -> list[tuple[Buffer, Buffer]]:
        """Checksums compared, bodies decompressed: what begins with the levels of each page, and what holds its values."""
        begins = begins + headers["header_bytes"]
        names = ("offset", "type", "has_crc", "crc", "is_compressed", "decoded_bytes")
        fields = [headers[name].tolist() for name in names]
        places = (begins, begins + headers["stored_bytes"], headers["rep_bytes"] + headers["def_bytes"])
        found = []
        with self._source.blamed(0, "the page") as place:
            for codec, begin, end, in_front, place.offset, kind, has_crc, crc, is_compressed, decoded in zip(
                codecs.tolist(), *map(np.ndarray.tolist, places), *fields, strict=True
            ):
                body = data[begin:end]
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
            body = page[header.header_bytes :]
            _check_body(header.stored_bytes, len(body))
            if header.crc is not None:
                check_crc(header.crc, body)
            values = decompress(codec, body, header.decoded_bytes)
            found: Array = plain_values(values, 0, header.num_values, self._column.physical).copy()
            found.setflags(write=False)
            return found


def _check_body(size: int, expected: int) -> None:
    if size != expected:
        raise MalformedError(f"its body is of {size} bytes, the index says {expected}")


def _check_counts(block: np.void, tokens: int, rows: int, continues: bool) -> None:
    if tokens != block["tokens"]:
        raise MalformedError(f"it has {tokens} tokens, the index says {block['tokens']}")
    if block["rows"] >= 0 and (rows, continues) != (block["rows"], bool(block["flags"] & CONTINUES)):
        begins = "in the middle of a row" if continues else "with a row"
        raise MalformedError(f"it begins {begins} and {rows} rows begin in it, the index says otherwise")
