"""The enums of Parquet's metadata: types, encodings, codecs and pages.

Source: parquet-format, src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

from enum import IntEnum


class Physical(IntEnum):
    """The physical type of a stored value."""

    BOOLEAN = 0
    INT32 = 1
    INT64 = 2
    INT96 = 3
    FLOAT = 4
    DOUBLE = 5
    BYTE_ARRAY = 6
    FIXED_LEN_BYTE_ARRAY = 7


class Repetition(IntEnum):
    """How often a field may occur in its parent: once, at most once, or any number of times."""

    REQUIRED = 0
    OPTIONAL = 1
    REPEATED = 2


class Encoding(IntEnum):
    """The encoding of values, or of levels."""

    PLAIN = 0
    PLAIN_DICTIONARY = 2
    RLE = 3
    BIT_PACKED = 4
    DELTA_BINARY_PACKED = 5
    DELTA_LENGTH_BYTE_ARRAY = 6
    DELTA_BYTE_ARRAY = 7
    RLE_DICTIONARY = 8
    BYTE_STREAM_SPLIT = 9


class PageType(IntEnum):
    """The kind of a page."""

    DATA = 0
    INDEX = 1
    DICTIONARY = 2
    DATA_V2 = 3


class CodecId(IntEnum):
    """The compression of pages."""

    UNCOMPRESSED = 0
    SNAPPY = 1
    GZIP = 2
    LZO = 3
    BROTLI = 4
    LZ4_HADOOP = 5
    ZSTD = 6
    LZ4_RAW = 7


def name_of(kind: type[IntEnum], number: int) -> str:
    """Return the name of an enum member for messages, or "unknown" and the number if no member has
    this number."""
    return kind(number).name if number in kind._value2member_map_ else f"unknown ({number})"
