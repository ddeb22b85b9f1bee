"""The footer of an Arrow IPC file: the positions of its record batches, and its schema.

    ARROW1 00 00 | schema | dictionaries and batches ... | footer (flatbuffer) | its length (int32)
    | ARROW1

Source: Arrow columnar format, "IPC File Format"; File.fbs.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.errors import (
    REWRITE_REMEDY,
    UNFINISHED,
    CorruptFileError,
    DataError,
    UnsupportedFileError,
)
from megablend.formats.arrow.flatbuffer import FlatbufferError, Table
from megablend.formats.base import Array
from megablend.storage.base import Storage
from megablend.storage.prefetched import request_tail

MAGIC = b"ARROW1"
_HEAD_BYTES = 8
"""Size in bytes of the magic number at the start of a file, with its padding."""
_TAIL_BYTES = 4 + len(MAGIC)
"""Number of bytes after the footer: the footer's length, and the magic number."""
_PROBE_BYTES = 4096
"""Number of bytes at a file's start that are searched for the message of an old stream."""
CONTINUATION = b"\xff\xff\xff\xff"
"""The bytes that every message of a stream begins with."""
SCHEMA = 1
"""The number of the kind of message that contains a schema, in Message.fbs."""
_METADATA_V4 = 3
"""The oldest metadata version that is supported, by its number in File.fbs."""

PLACE_DTYPE = np.dtype(
    [("offset", "<i8"), ("metadata_bytes", "<i4"), ("padding", "<i4"), ("body_bytes", "<i8")]
)
"""The place of a record batch: the first byte of its message, and the sizes of its metadata and its
body (File.fbs: Block)."""

SCHEMA_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, NotImplementedError)
"""What pyarrow raises for schemas that it cannot parse."""


def schema_error(path: str, what: str, error: Exception, offset: int) -> DataError:
    """Return the error for one of SCHEMA_ERRORS: UnsupportedFileError if a column has a type that
    only other implementations of Arrow have, otherwise CorruptFileError."""
    if isinstance(error, NotImplementedError):
        problem = f"cannot be read by pyarrow: {error}; leave out or cast the column"
        return UnsupportedFileError(path, f"its {what} {problem}", offset=offset)
    return CorruptFileError(path, f"invalid {what}: {error}; {REWRITE_REMEDY}", offset=offset)


def bodies_of(places: Array | np.void) -> Int64s:
    """Return the offset in the file of each batch's body, which follows its message: int64 [n], or
    a scalar for a single place."""
    bodies: Int64s = places["offset"] + places["metadata_bytes"]
    return bodies


def refuse_old_stream(path: str, head: bytes) -> None:
    """Refuse a stream that was written before Arrow 0.15, whose messages have no continuation
    marker before their size. Raises: UnsupportedFileError.

    Args:
        head: the first bytes of the stream.
    """
    try:
        message = Table.root(head, 4)
        is_schema = message.scalar(1, "<B", 0) == SCHEMA and message.table(2) is not None
    except FlatbufferError:
        return
    if is_schema:
        raise UnsupportedFileError(
            path,
            "is an Arrow stream in the format of releases before 0.15 (2019); rewrite it with `pyarrow.ipc.open_stream` "
            "and `new_stream`",
        )


def read_footer(path: str, size: int, storage: Storage) -> bytes:
    """Read the footer of a file of `size` bytes, with the length and the magic number after it.

    Raises: CorruptFileError; UnsupportedFileError for an Arrow stream or a Feather V1 file.
    """
    if size < _HEAD_BYTES + _TAIL_BYTES:
        raise CorruptFileError(
            path, f"has {size} bytes, too few for an Arrow IPC file; restore the file"
        )
    request_tail(storage, path, size)
    head = storage.read(path, 0, _HEAD_BYTES)
    if head[:4] == b"FEA1":
        raise UnsupportedFileError(
            path,
            "is a Feather V1 file, which cannot contain lists; write the tokens to a Parquet file",
        )
    if head[:4] == CONTINUATION:
        raise UnsupportedFileError(
            path,
            "is an Arrow stream, not an Arrow file; set `format: arrow-stream` for its source, and put files and streams "
            "into separate sources",
        )
    if head[: len(MAGIC)] != MAGIC:
        refuse_old_stream(path, storage.read(path, 0, min(size, _PROBE_BYTES)))
        raise CorruptFileError(
            path,
            f"begins with {head!r}, not with {MAGIC!r}: not an Arrow IPC file; {REWRITE_REMEDY}",
            offset=0,
        )
    tail = storage.read(path, size - _TAIL_BYTES, _TAIL_BYTES)
    if tail[4:] != MAGIC:
        raise CorruptFileError(
            path,
            f"ends with {tail[4:]!r}, not with {MAGIC!r}: {UNFINISHED}",
            offset=size - len(MAGIC),
        )
    footer_bytes = int.from_bytes(tail[:4], "little", signed=True)
    if not 0 < footer_bytes <= size - _HEAD_BYTES - _TAIL_BYTES:
        raise CorruptFileError(
            path,
            f"has an invalid footer length: {footer_bytes} bytes; {REWRITE_REMEDY}",
            offset=size - _TAIL_BYTES,
        )
    return storage.read(path, size - _TAIL_BYTES - footer_bytes, footer_bytes + _TAIL_BYTES)


def batch_places(path: str, size: int, footer: bytes) -> Array:
    """Parse the places of the record batches, in the footer's order, and check that each is within
    the file: PLACE_DTYPE [num_batches].

    Raises: CorruptFileError; UnsupportedFileError for big-endian files and metadata older than V4.
    """
    start = size - len(footer)
    try:
        table = Table.root(footer)
        version = table.scalar(0, "<h", 0)
        schema = table.table(1)
        big_endian = schema is not None and schema.scalar(0, "<h", 0) != 0
        places = table.vector(3, PLACE_DTYPE)
    except FlatbufferError as error:
        raise CorruptFileError(
            path, f"invalid footer: {error}; {REWRITE_REMEDY}", offset=start
        ) from error
    check_encoding(path, version, big_endian=big_endian)
    offset = places["offset"]
    metadata = places["metadata_bytes"]
    body = places["body_bytes"]
    inside = (
        (offset >= _HEAD_BYTES)
        & (offset <= start)
        & (metadata >= 8)
        & (body >= 0)
        & (body <= start)
    )
    inside &= offset + metadata + np.where(inside, body, 0) <= start
    if not inside.all():
        number = int(np.argmin(inside))
        raise CorruptFileError(
            path,
            f"invalid footer: batch {number} ({metadata[number]} + {body[number]} bytes at byte {offset[number]}) is not "
            f"before the footer at byte {start}; {REWRITE_REMEDY}",
            offset=start,
        )
    return places


def check_encoding(path: str, version: int, *, big_endian: bool) -> None:
    """Check the metadata version of a file, by its number in File.fbs, and its byte order.
    Raises: UnsupportedFileError."""
    if version < _METADATA_V4:
        raise UnsupportedFileError(
            path, f"has Arrow metadata version V{version + 1}; rewrite it with a newer Arrow"
        )
    if big_endian:
        raise UnsupportedFileError(path, "is big-endian; rewrite it on a little-endian machine")


def read_schema(path: str, size: int, footer: bytes) -> pa.Schema:
    """Parse the schema in a footer. Raises: see `schema_error`."""
    try:
        return pa.ipc.open_file(pa.BufferReader(MAGIC + b"\0\0" + footer)).schema
    except SCHEMA_ERRORS as error:
        raise schema_error(path, "footer", error, size - len(footer)) from error
