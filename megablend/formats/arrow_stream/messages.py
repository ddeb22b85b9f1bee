"""The messages of an Arrow IPC stream: a schema, record batches, and an end-of-stream marker.

    FF FF FF FF | size of the metadata (int32) | metadata (flatbuffer) | body      for each message
    FF FF FF FF 00 00 00 00                                                        at the end

There is no list of messages: each one gives the position of the next.

Source: Arrow columnar format, "IPC Streaming Format", "Encapsulated message format"; Message.fbs.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from megablend.errors import REWRITE_REMEDY, UNFINISHED, CorruptFileError, UnsupportedFileError
from megablend.formats.arrow.flatbuffer import FlatbufferError, Table
from megablend.formats.arrow.footer import (
    CONTINUATION,
    MAGIC,
    PLACE_DTYPE,
    SCHEMA,
    SCHEMA_ERRORS,
    check_encoding,
    refuse_old_stream,
    schema_error,
)
from megablend.formats.arrow.message import RECORD_BATCH
from megablend.formats.arrow_stream.look_ahead import LookAhead
from megablend.formats.base import Array
from megablend.storage.base import Storage

_PROBE_BYTES = 4096
"""Number of bytes of a message that are read first: more than the metadata of most batches."""
_DICTIONARY = 2
"""The number of the kind of message that contains a dictionary, in Message.fbs."""


class Stream(NamedTuple):
    """The schema and the record batches of a stream."""

    schema_bytes: bytes
    """The stream's first message, which contains the schema."""
    places: Array
    """Places of the record batches, in file order: PLACE_DTYPE [num_batches]."""


def read_stream(path: str, size: int, storage: Storage) -> Stream:
    """Find the record batches of a stream of `size` bytes.

    Raises: CorruptFileError if it is not a stream, or is truncated or inconsistent;
        UnsupportedFileError for metadata older than V4, and big-endian streams; MissingFileError.
    """
    with contextlib.closing(LookAhead(path, size, storage)) as ahead:
        return _read_messages(path, size, ahead)


def read_schema(path: str, schema_bytes: bytes) -> pa.Schema:
    """Parse the schema of a stream. Raises: see `schema_error`."""
    try:
        return pa.ipc.read_schema(pa.BufferReader(schema_bytes))
    except SCHEMA_ERRORS as error:
        raise schema_error(path, "schema", error, 0) from error


class _Message(NamedTuple):
    """A message without its body."""

    kind: int
    metadata: bytes
    """The metadata, preceded by CONTINUATION and its size."""
    body_bytes: int


def _read_messages(path: str, size: int, ahead: LookAhead) -> Stream:
    """Read all messages of a stream. Raises: CorruptFileError, UnsupportedFileError."""
    schema_bytes = b""
    places = list[tuple[int, int, int, int]]()
    offset = 0
    message = _read_message(path, offset, size, ahead)
    while message is not None:
        _check_kind(path, offset, message.kind)
        if message.kind == SCHEMA:
            schema_bytes = message.metadata
        elif message.kind == RECORD_BATCH:
            places.append((offset, len(message.metadata), 0, message.body_bytes))
        message_bytes = len(message.metadata) + message.body_bytes
        offset += message_bytes
        ahead.pass_message(offset, message_bytes)
        message = _read_message(path, offset, size, ahead)
    if offset + 8 != size:
        raise CorruptFileError(
            path,
            f"{size - offset - 8} bytes follow the end of its Arrow stream; {REWRITE_REMEDY}",
            offset=offset + 8,
        )
    if not schema_bytes:
        raise CorruptFileError(path, f"is an Arrow stream without a schema; {REWRITE_REMEDY}")
    return Stream(schema_bytes, np.array(places, PLACE_DTYPE))


def _read_message(path: str, offset: int, size: int, ahead: LookAhead) -> _Message | None:
    """Read the message that begins at an offset, without its body; return None for the
    end-of-stream marker. Raises: CorruptFileError, UnsupportedFileError."""
    data = ahead.read(offset, min(_PROBE_BYTES, size - offset)) if offset < size else b""
    if len(data) < 8:
        raise CorruptFileError(
            path,
            f"has no end-of-stream marker: {UNFINISHED}",
            offset=offset,
        )
    if offset == 0 and data.startswith(MAGIC):
        raise UnsupportedFileError(
            path,
            "is an Arrow file, not an Arrow stream; set `format: arrow` for its source, and put files and streams into "
            "separate sources",
        )
    if data[:4] != CONTINUATION:
        if offset == 0:
            refuse_old_stream(path, data)
        raise CorruptFileError(
            path,
            f"no message of an Arrow stream begins here: found {data[:4]!r}; {REWRITE_REMEDY}",
            offset=offset,
        )
    metadata_bytes = 8 + int.from_bytes(data[4:8], "little", signed=True)
    if metadata_bytes == 8:
        return None
    if not 8 < metadata_bytes <= size - offset:
        raise CorruptFileError(
            path,
            f"a message has {metadata_bytes} bytes of metadata, but only {size - offset} bytes of the file are left: "
            f"{UNFINISHED}",
            offset=offset,
        )
    if metadata_bytes > len(data):
        data = ahead.read(offset, metadata_bytes)
    metadata = data[:metadata_bytes]
    kind, body_bytes = _parse(path, offset, metadata)
    if not 0 <= body_bytes <= size - offset - metadata_bytes:
        raise CorruptFileError(
            path,
            f"a message has a body of {body_bytes} bytes, but only {size - offset - metadata_bytes} bytes are left: "
            f"{UNFINISHED}",
            offset=offset,
        )
    return _Message(kind, metadata, body_bytes)


def _check_kind(path: str, offset: int, kind: int) -> None:
    """Check that a message of this kind is allowed at this offset.

    Raises: CorruptFileError; UnsupportedFileError.
    """
    if (kind == SCHEMA) != (offset == 0):
        raise CorruptFileError(
            path,
            f"the schema of an Arrow stream must be its first message, and occur only once; {REWRITE_REMEDY}",
            offset=offset,
        )
    if kind not in (SCHEMA, _DICTIONARY, RECORD_BATCH):
        raise UnsupportedFileError(
            path,
            f"has a message of kind {kind}, expected only record batches; write the stream with `pyarrow.ipc.new_stream`",
            offset=offset,
        )


def _parse(path: str, offset: int, metadata: bytes) -> tuple[int, int]:
    """Return the kind of a message, and the size of its body in bytes. Raises: CorruptFileError,
    UnsupportedFileError."""
    try:
        message = Table.root(metadata, 8)
        version = message.scalar(0, "<h", 0)
        kind = message.scalar(1, "<B", 0)
        body_bytes = message.scalar(3, "<q", 0)
        header = message.table(2)
        big_endian = kind == SCHEMA and header is not None and header.scalar(0, "<h", 0) != 0
    except FlatbufferError as error:
        raise CorruptFileError(
            path, f"invalid message: {error}; {REWRITE_REMEDY}", offset=offset
        ) from error
    check_encoding(path, version, big_endian=big_endian)
    return kind, body_bytes
