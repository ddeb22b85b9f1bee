"""The messages of an Arrow IPC stream: a schema, record batches, and an end-of-stream marker.

    FF FF FF FF | size of the metadata (int32) | metadata (flatbuffer) | body      for each message
    FF FF FF FF 00 00 00 00                                                        at the end

There is no list of messages: each one gives the position of the next.

Source: Arrow columnar format, "IPC Streaming Format", "Encapsulated message format"; Message.fbs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from megablend.errors import REWRITE_REMEDY, UNFINISHED, CorruptFileError, UnsupportedFileError
from megablend.formats.arrow.flatbuffer import FlatbufferError, Table
from megablend.formats.arrow.footer import MAGIC, PLACE_DTYPE
from megablend.formats.base import Array
from megablend.storage.base import Storage
from megablend.storage.prefetched import stream_portions

PORTION_BYTES = 4 << 20
SMALL_BYTES = 256 << 10
"""Of a message with its body: less is transferred in about the time of a round trip."""
_FEW = 4
"""Small batches in a row after which more are expected."""


class LookAhead:
    """Reads a file from its beginning to its end.

    Args:
        size: bytes of the file.
    """

    def __init__(self, path: str, size: int, storage: Storage) -> None:
        self._path = path
        self._size = size
        self._storage = storage
        self._small = 0
        self._portions: Iterator[int] | None = None
        self._begin = self._stop = 0

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from an offset on; offsets do not decrease. Raises: as Storage.read does."""
        while self._portions is not None and offset >= self._stop:
            self._stop = min(self._size, self._begin + (next(self._portions) + 1) * PORTION_BYTES)
        return self._storage.read(self._path, offset, size)

    def pass_message(self, offset: int, size: int) -> None:
        """The message of `size` bytes before `offset` is done; decides how those after it are
        read."""
        self._small = self._small + 1 if size < SMALL_BYTES else 0
        if not self._small:
            self.close()
        elif self._small >= _FEW and self._portions is None:
            self._begin = self._stop = offset
            starts = np.arange(offset, self._size, PORTION_BYTES)
            sizes = np.minimum(PORTION_BYTES, self._size - starts)
            portions = [(starts[i : i + 1], sizes[i : i + 1]) for i in range(len(starts))]
            self._portions = iter(stream_portions(self._storage, self._path, portions))

    def close(self) -> None:
        """Drop what was requested and not read."""
        if self._portions is not None and hasattr(self._portions, "close"):
            self._portions.close()
        self._portions = None


CONTINUATION = b"\xff\xff\xff\xff"
_PROBE_BYTES = 4096
"""First read of each message: more than the metadata of most batches."""
_METADATA_V4 = 3
_SCHEMA = 1
_DICTIONARY = 2
_RECORD_BATCH = 3


class Stream(NamedTuple):
    """The contents of a stream."""

    schema_bytes: bytes
    """Its first message."""
    places: Array
    """PLACE_DTYPE [num_batches], in file order."""


def read_stream(path: str, size: int, storage: Storage) -> Stream:
    """Find the record batches of a stream of `size` bytes.

    Raises: CorruptFileError if it is not a stream, truncated, or contradicts itself;
        UnsupportedFileError for metadata older than V4, and big-endian streams; MissingFileError.
    """
    with contextlib.closing(LookAhead(path, size, storage)) as ahead:
        return _read_messages(path, size, ahead)


def _read_messages(path: str, size: int, ahead: LookAhead) -> Stream:
    found = list[tuple[int, int, int, int]]()
    offset = 0
    schema_bytes = b""
    while True:
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
            raise CorruptFileError(
                path,
                f"no message of an Arrow stream begins here: found {data[:4]!r}; {REWRITE_REMEDY}",
                offset=offset,
            )
        metadata_bytes = 8 + int.from_bytes(data[4:8], "little", signed=True)
        if metadata_bytes == 8:
            break
        if not 8 < metadata_bytes <= size - offset:
            raise CorruptFileError(
                path,
                f"message with {metadata_bytes} bytes of metadata, but only {size - offset} bytes of the file are left: "
                f"{UNFINISHED}",
                offset=offset,
            )
        if metadata_bytes > len(data):
            data = ahead.read(offset, metadata_bytes)
        kind, body_bytes = _parse(path, offset, data[:metadata_bytes])
        if not 0 <= body_bytes <= size - offset - metadata_bytes:
            raise CorruptFileError(
                path,
                f"message with a body of {body_bytes} bytes, only {size - offset - metadata_bytes} bytes are left: "
                f"{UNFINISHED}",
                offset=offset,
            )
        if (kind == _SCHEMA) != (offset == 0):
            raise CorruptFileError(
                path,
                f"the schema of an Arrow stream must be its first message, and occur only once; {REWRITE_REMEDY}",
                offset=offset,
            )
        if kind == _SCHEMA:
            schema_bytes = data[:metadata_bytes]
        elif kind == _RECORD_BATCH:
            found.append((offset, metadata_bytes, 0, body_bytes))
        elif kind != _DICTIONARY:
            raise UnsupportedFileError(
                path, f"has a message of kind {kind}, expected record batches only", offset=offset
            )
        offset += metadata_bytes + body_bytes
        ahead.pass_message(offset, metadata_bytes + body_bytes)
    if offset + 8 != size:
        raise CorruptFileError(
            path,
            f"{size - offset - 8} bytes follow the end of its Arrow stream; {REWRITE_REMEDY}",
            offset=offset + 8,
        )
    if not schema_bytes:
        raise CorruptFileError(path, f"is an Arrow stream without a schema; {REWRITE_REMEDY}")
    return Stream(schema_bytes, np.array(found, PLACE_DTYPE))


def read_schema(path: str, schema_bytes: bytes) -> pa.Schema:
    """The schema of a stream. Raises: CorruptFileError."""
    try:
        return pa.ipc.read_schema(pa.BufferReader(schema_bytes))
    except (pa.ArrowException, OSError, ValueError, KeyError, NotImplementedError) as error:
        raise CorruptFileError(path, f"schema: {error}; {REWRITE_REMEDY}", offset=0) from error


def pack_places(places: Array) -> dict[str, Any]:
    """Positions of batches, as compact JSON: most are contiguous, with metadata of one size. The
    inverse of `unpack_places`."""
    ends = places["offset"] + places["metadata_bytes"] + places["body_bytes"]
    before = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(places)]
    columns = {
        "gaps": places["offset"] - before,
        "metadata_bytes": places["metadata_bytes"],
        "body_bytes": places["body_bytes"],
    }
    packed: dict[str, Any] = {"count": len(places)}
    for name, values in columns.items():
        begin = values[:1].tolist()
        rest = values[1:].tolist()
        packed[name] = [*begin, rest[0]] if rest and len(set(rest)) == 1 else [*begin, *rest]
    return packed


def unpack_places(path: str, packed: dict[str, Any], size: int) -> Array:
    """PLACE_DTYPE [num_batches]. Raises: CorruptFileError
    if they are not within a file of `size` bytes."""
    count = int(packed["count"])
    places = np.zeros(count if 0 <= count <= size else 0, PLACE_DTYPE)
    try:
        gaps, metadata, body = (
            _expand(packed[name], len(places)) for name in ("gaps", "metadata_bytes", "body_bytes")
        )
        places["metadata_bytes"] = metadata
        places["body_bytes"] = body
        places["offset"] = np.cumsum(gaps + metadata + body) - metadata - body
        low = min((int(each.min(initial=0)) for each in (gaps, metadata, body)), default=0)
        if low < 0 or len(places) != count or places["offset"].max(initial=0) > size:
            raise ValueError(f"{count} batches do not fit in {size} bytes")
    except (ValueError, OverflowError) as error:
        raise CorruptFileError(
            path, f"the index has wrong positions of its batches ({error})"
        ) from error
    return places


def _expand(values: list[int], count: int) -> Array:
    if len(values) == 2 < count:
        values = [values[0], *[values[1]] * (count - 1)]
    found = np.array(values, np.int64)
    if len(found) != count:
        raise ValueError(f"{len(found)} values for {count} batches")
    return found


def _parse(path: str, offset: int, metadata: bytes) -> tuple[int, int]:
    """The kind of a message, and the size of its body."""
    try:
        message = Table.root(metadata, 8)
        version = message.scalar(0, "<h", 0)
        kind = message.scalar(1, "<B", 0)
        body_bytes = message.scalar(3, "<q", 0)
        header = message.table(2)
        big_endian = kind == _SCHEMA and header is not None and header.scalar(0, "<h", 0) != 0
    except FlatbufferError as error:
        raise CorruptFileError(
            path, f"message: {error}; {REWRITE_REMEDY}", offset=offset
        ) from error
    if version < _METADATA_V4:
        raise UnsupportedFileError(
            path, f"has Arrow metadata version V{version + 1}; rewrite it with a newer Arrow"
        )
    if big_endian:
        raise UnsupportedFileError(path, "is big-endian; rewrite it on a little-endian machine")
    return kind, body_bytes
