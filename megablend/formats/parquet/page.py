"""A page's body: checksum, decompression, and its three parts: repetition levels, definition levels, values.

V1 compresses the three together; V2 leaves the levels uncompressed in front.

Source: parquet-format, README.md ("Data Pages", "Checksumming") and Encodings.md.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.codecs import decompress
from megablend.formats.parquet.names import Encoding, PageType, name_of
from megablend.formats.parquet.page_header import PageHeader
from megablend.formats.parquet.schema import Column
from megablend.formats.parquet.thrift import MalformedError, UnsupportedError
from megablend.kernels.levels import count_hybrid, decode_hybrid, piece_offsets

Levels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What a page's levels say about rows."""

    offsets: npt.NDArray[np.int64]
    """int64 [num_pieces + 1]: piece i is tokens[offsets[i]:offsets[i+1]]."""
    continues: bool
    """Whether the first piece continues a row of the page before."""

    @property
    def num_tokens(self) -> int:
        """Non-null values of the page."""
        return int(self.offsets[-1])

    @property
    def num_rows(self) -> int:
        """Rows that begin in the page."""
        return len(self.offsets) - 1 - self.continues


def check_crc(header: PageHeader, body: memoryview) -> None:
    """Compare the body's checksum with the header's, if it has one. Raises MalformedError."""
    if header.crc is None:
        return
    found, expected = zlib.crc32(body), header.crc & 0xFFFF_FFFF  # stored as a signed number
    if found != expected:
        raise MalformedError(f"its checksum is {found:08x}, its header says {expected:08x}")


def check_level_encodings(header: PageHeader, column: Column) -> None:
    """Refuse levels in BIT_PACKED, which RLE replaced: readers disagree about its order of bits (arrow issue 42368).

    Some writers name it where there are no levels at all; that is fine. Raises UnsupportedError.
    """
    definition, repetition = header.level_encodings
    for level, encoding in ((column.max_def, definition), (column.max_rep, repetition)):
        if level and encoding != Encoding.RLE:
            name = name_of(Encoding, encoding)
            raise UnsupportedError(f"its levels are in {name}, which readers disagree about; write the file again")


def decode_pieces(header: PageHeader, body: memoryview, codec: int, column: Column) -> tuple[Pieces, memoryview]:
    """The pieces of a data page and its encoded values. Raises MalformedError, UnsupportedError."""
    if header.type == PageType.DATA_V2:
        return decode_v2_levels(header, body, column), _v2_values(header, body, codec)
    check_level_encodings(header, column)
    values = decompress(codec, body, header.decoded_bytes)
    rep, values = _v1_levels(values, column.max_rep, header.num_values)
    definition, values = _v1_levels(values, column.max_def, header.num_values)
    return _pieces(rep, definition, column), values


def decode_v2_levels(header: PageHeader, body: memoryview, column: Column) -> Pieces:
    """The pieces of a V2 page, of which `body` needs to hold no more than the levels. Raises MalformedError."""
    rep = _decode(body[: header.rep_bytes], column.max_rep, header.num_values)
    definition = _decode(body[header.rep_bytes :][: header.def_bytes], column.max_def, header.num_values)
    return _pieces(rep, definition, column)


def _v2_values(header: PageHeader, body: memoryview, codec: int) -> memoryview:
    levels = header.rep_bytes + header.def_bytes
    size = header.decoded_bytes - levels
    if not header.is_compressed or size == 0:
        return body[levels:]
    return decompress(codec, body[levels:], size)


def _v1_levels(data: memoryview, max_level: int, num_levels: int) -> tuple[Levels, memoryview]:
    """Levels, a length of four bytes before them, and what follows; a column without such levels stores nothing."""
    if max_level == 0:
        return _decode(data[:0], 0, num_levels), data
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size > len(data) - 4:
        raise MalformedError(f"its levels should take {size} bytes, {max(0, len(data) - 4)} are left in the page")
    return _decode(data[4 : 4 + size], max_level, num_levels), data[4 + size :]


def _decode(data: memoryview, max_level: int, num_levels: int) -> Levels:
    if max_level == 0:
        return np.zeros(num_levels, np.uint8)
    runs = np.frombuffer(data, np.uint8)
    found = count_hybrid(runs, max_level.bit_length())
    if found < num_levels:
        raise MalformedError(f"its levels are {'broken' if found < 0 else found}, its header says {num_levels}")
    levels = np.empty(num_levels, np.uint8)
    decode_hybrid(runs, max_level.bit_length(), levels)
    if num_levels and levels.max() > max_level:
        raise MalformedError(f"it has a level {levels.max()}, above the column's {max_level}")
    return levels


def _pieces(rep: Levels, definition: Levels, column: Column) -> Pieces:
    offsets = np.zeros(len(rep) + 1, np.int64)
    used = piece_offsets(rep, definition, column.max_def, offsets)
    return Pieces(offsets=offsets[:used].copy(), continues=bool(len(rep) and rep[0]))
