"""Pages to tokens."""

from __future__ import annotations

import functools

import numpy as np

from megablend.formats.base import CONTINUES, Array, DecodedBlock
from megablend.formats.parquet.codecs import decompress
from megablend.formats.parquet.decode import BY_ROW_GROUP, DICTIONARY_ENCODINGS, Dictionary, decode_values, plain_values
from megablend.formats.parquet.names import PageType
from megablend.formats.parquet.page import Pieces, check_crc, decode_pieces
from megablend.formats.parquet.page_header import PageHeader, parse_page_header
from megablend.formats.parquet.row_group import read_row_group
from megablend.formats.parquet.schema import Column
from megablend.formats.parquet.source import ByteSource
from megablend.formats.parquet.thrift import MalformedError

DICTIONARIES = 8
"""Dictionary pages kept, decompressed: the last few chunks that were read."""
MERGED_BYTES = 4 << 20
"""Neighbouring blocks are read together, up to this many bytes."""


class ParquetReader:
    """Reads pages of one column of one file."""

    def __init__(self, source: ByteSource, column: Column) -> None:
        self._source = source
        self._column = column
        self._dictionary = functools.lru_cache(DICTIONARIES)(self._read_dictionary)  # no lock of its own: fork is safe

    def __reduce__(self) -> tuple[type[ParquetReader], tuple[ByteSource, Column]]:
        return ParquetReader, (self._source, self._column)

    def read(self, blocks: Array, chunks: Array) -> list[DecodedBlock]:
        """Decode blocks; see `BlockReader.read`. Raises CorruptFileError, UnsupportedFileError."""
        offsets, first = np.unique(blocks["offset"], return_index=True)
        decoded: dict[int, DecodedBlock] = {}
        # A block that is a whole chunk is read by pyarrow: nothing to fetch for it.
        sizes = np.where(blocks["encoding"] == BY_ROW_GROUP, 0, blocks["stored_bytes"]).astype(np.int64)[first]
        for run in neighbours(offsets, sizes):
            start = int(offsets[run][0])
            data = memoryview(self._source.read(start, int(sizes[run].sum()), "a run of pages"))
            for block, offset, size in zip(blocks[first[run]], offsets[run].tolist(), sizes[run].tolist(), strict=True):
                page = data[offset - start : offset - start + size]
                decoded[offset] = self._decode(block, chunks[block["chunk"]], page)
        return [decoded[offset] for offset in blocks["offset"].tolist()]

    def _decode(self, block: np.void, chunk: np.void, data: memoryview) -> DecodedBlock:
        with self._source.blamed(int(block["offset"]), "the page"):
            if block["encoding"] == BY_ROW_GROUP:
                tokens, pieces = read_row_group(self._source, self._column, int(chunk["row_group"]))
            else:
                tokens, pieces = self._decode_page(chunk, data)
            _check_counts(block, pieces)
        pieces.offsets.flags.writeable = False
        return DecodedBlock(tokens, pieces.offsets)

    def _decode_page(self, chunk: np.void, data: memoryview) -> tuple[Array, Pieces]:
        header, body = split_page(data)
        if not header.is_data:
            raise MalformedError(f"it is a page of type {header.type}, not of data")
        pieces, values = decode_pieces(header, body, int(chunk["codec"]), self._column)
        dictionary = None
        if header.encoding in DICTIONARY_ENCODINGS and chunk["dictionary_offset"] >= 0:
            place = int(chunk["dictionary_offset"]), int(chunk["dictionary_bytes"])
            dictionary = self._dictionary(*place, int(chunk["codec"]))
        column = self._column
        tokens = decode_values(values, pieces.num_tokens, column.physical, header.encoding, column.dtype, dictionary)
        return tokens, pieces

    def _read_dictionary(self, offset: int, size: int, codec: int) -> Dictionary:
        data = memoryview(self._source.read(offset, size, "the dictionary page"))
        with self._source.blamed(offset, "the dictionary page"):
            header, body = split_page(data)
            if header.type != PageType.DICTIONARY:
                raise MalformedError(f"it is a page of type {header.type}")
            values = decompress(codec, body, header.decoded_bytes)
            plain_values(values, header.num_values, self._column.physical)  # there must be as many as announced
            return values, header.num_values


def split_page(data: memoryview) -> tuple[PageHeader, memoryview]:
    """Header and body of a page that fills `data`, its checksum compared. Raises MalformedError."""
    header = parse_page_header(data)
    body = data[header.header_bytes :]
    if len(body) != header.stored_bytes:
        raise MalformedError(f"its body is of {header.stored_bytes} bytes, the index says {len(body)}")
    check_crc(header, body)
    return header, body


def neighbours(offsets: Array, sizes: Array) -> list[slice]:
    """Runs of blocks (in file order) that follow each other without a gap and take up to MERGED_BYTES, or one alone."""
    runs = []
    begin, taken = 0, 0
    for i, (offset, size) in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True)):
        follows = i > begin and offset == int(offsets[i - 1]) + int(sizes[i - 1])
        if i > begin and (not follows or taken + size > MERGED_BYTES):
            runs.append(slice(begin, i))
            begin, taken = i, 0
        taken += size
    return [*runs, slice(begin, len(offsets))] if len(offsets) else []


def _check_counts(block: np.void, pieces: Pieces) -> None:
    if pieces.num_tokens != block["tokens"]:
        raise MalformedError(f"it has {pieces.num_tokens} tokens, the index says {block['tokens']}")
    if block["rows"] >= 0 and (pieces.num_rows, pieces.continues) != (block["rows"], bool(block["flags"] & CONTINUES)):
        begins = "in the middle of a row" if pieces.continues else "with a row"
        raise MalformedError(f"it begins {begins} and {pieces.num_rows} rows begin in it, the index says otherwise")
