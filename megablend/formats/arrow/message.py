"""The message of a record batch: the length and the number of nulls of each field, and the
positions of the buffers.

Source: Arrow columnar format, "RecordBatch message"; Message.fbs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megablend.errors import REWRITE_REMEDY, CorruptFileError
from megablend.formats.arrow.column import Column, Level
from megablend.formats.arrow.flatbuffer import FlatbufferError, Table
from megablend.formats.base import Array

_NODE_DTYPE = np.dtype([("length", "<i8"), ("nulls", "<i8")])
_BUFFER_DTYPE = np.dtype([("offset", "<i8"), ("size", "<i8")])
RECORD_BATCH = 3
"""The number of the kind of message that contains a record batch, in Message.fbs."""
_CODECS = {0: "lz4", 1: "zstd"}


class BatchError(ValueError):
    """Raised if the parts of a batch contradict each other or the schema; see `locating`."""


@contextlib.contextmanager
def locating(path: str, place: np.void) -> Iterator[None]:
    """Convert a BatchError to a CorruptFileError that names the file and the place of the batch.
    `place` is a record of PLACE_DTYPE."""
    try:
        yield
    except BatchError as error:
        raise CorruptFileError(
            path, f"the record batch {error}; {REWRITE_REMEDY}", offset=int(place["offset"])
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The contents of a record batch's message."""

    rows: int
    nodes: Array
    """The length and the number of nulls of each field: _NODE_DTYPE [num_nodes]."""
    buffers: Array
    """The place of each buffer, counted from the start of the body: _BUFFER_DTYPE [num_buffers]."""
    views: Array
    """Number of data buffers of each view column: int64 [num_views]."""
    codec: str | None
    """Name of the codec, lz4 or zstd; None if buffers are not compressed."""


def parse_batch(metadata: bytes, body_bytes: int, column: Column) -> Batch:
    """Parse a message, and compare it with the schema. Raises: BatchError if it is invalid or does
    not match."""
    prefix = 8 if metadata[:4] == b"\xff\xff\xff\xff" else 4
    try:
        message = Table.root(metadata, prefix)
        header = message.table(2)
        if message.scalar(1, "<B", 0) != RECORD_BATCH or header is None:
            raise BatchError("is missing: found a message of another kind")
        rows = header.scalar(0, "<q", 0)
        nodes = header.vector(1, _NODE_DTYPE)
        buffers = header.vector(2, _BUFFER_DTYPE)
        compression = header.table(3)
        views = header.vector(4, "<i8")
        codec = None
        if compression is not None:
            codec = _CODECS.get(compression.scalar(0, "<b", 0), "unknown")
    except FlatbufferError as error:
        raise BatchError(f"has an invalid message: {error}") from error
    # Counts outside this range are wrong, and their sum may overflow; 0 is refused below
    views_fit = len(views) and 0 <= views.min() <= views.max() <= len(buffers)
    num_buffers = column.num_buffers + (int(views.sum()) if views_fit else 0)
    if len(nodes) != column.num_nodes or len(buffers) != num_buffers:
        raise BatchError(
            f"has {len(nodes)} nodes and {len(buffers)} buffers, but the schema needs {column.num_nodes} and "
            f"{num_buffers}"
        )
    if codec == "unknown":
        raise BatchError("has buffers that are compressed with an unknown codec")
    offset = buffers["offset"]
    size = buffers["size"]
    if not (
        (offset >= 0) & (size >= 0) & (offset <= body_bytes) & (size <= body_bytes - offset)
    ).all():
        raise BatchError(f"has a buffer outside its body of {body_bytes} bytes")
    return Batch(rows=rows, nodes=nodes, buffers=buffers, views=views, codec=codec)


def first_buffer(batch: Batch, level: Level) -> int:
    """Return the number of a level's first buffer, its validity bitmap."""
    return level.buffer + int(batch.views[: level.views].sum())


def column_buffers(batch: Batch, column: Column) -> list[int]:
    """Return the numbers of the buffers that have to be read for the column, values last."""
    numbers = [
        first_buffer(batch, level) for level in column.levels if batch.nodes[level.node]["nulls"]
    ]
    if column.kind in ("list", "large_list"):
        numbers.append(first_buffer(batch, column.levels[-2]) + 1)
    return [*numbers, first_buffer(batch, column.levels[-1]) + 1]


def needed_ranges(batch: Batch, column: Column, *, tokens: bool) -> list[tuple[int, int]]:
    """Return the offsets and sizes of the parts of a batch's body that a column needs.

    Args:
        tokens: whether the values are needed. If not, and if they are compressed, only the size
            that precedes them is needed.
    """
    ranges = []
    for number in column_buffers(batch, column):
        offset = int(batch.buffers["offset"][number])
        size = int(batch.buffers["size"][number])
        ranges.append((offset, size))
    if not tokens:
        offset, size = ranges.pop()
        if batch.codec is not None:
            ranges.append((offset, min(size, 8)))
    return [(offset, size) for offset, size in ranges if size]
