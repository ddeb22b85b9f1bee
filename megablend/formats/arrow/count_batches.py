"""Count the documents and tokens of record batches whose places are given in a file's footer or in
a stream's messages."""

from __future__ import annotations

import contextlib

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import UnsupportedFileError
from megablend.formats.arrow.buffers import MAX_BYTES, Buffers
from megablend.formats.arrow.column import Column
from megablend.formats.arrow.documents import find_documents
from megablend.formats.arrow.footer import bodies_of
from megablend.formats.arrow.message import (
    Batch,
    BatchError,
    column_buffers,
    locating,
    needed_ranges,
    parse_batch,
)
from megablend.formats.base import BLOCK_DTYPE, ENDS_AT_DOCUMENT_END, Array
from megablend.storage.base import Storage
from megablend.storage.prefetched import PrefetchedStorage, is_requested, request_ranges

_MAX_SHORT_BYTES = 64 << 10
"""If the needed part of the first batch ends within this number of bytes, the body of the last
batch is requested from its start. The last batch may have fewer rows, so its offsets may begin
earlier."""


def request_batches(path: str, places: Array, column: Column, storage: Storage) -> None:
    """Announce the reads that are needed to count batches; see `storage.prefetched`. places:
    PLACE_DTYPE [num_batches]."""
    if not isinstance(storage, PrefetchedStorage) or not len(places):
        return
    offsets, sizes = _expect_buffers(path, places, column, storage)
    offsets = np.append(offsets, places["offset"])
    sizes = np.append(sizes, places["metadata_bytes"])
    order = np.argsort(offsets, kind="stable")
    request_ranges(storage, path, offsets[order], sizes[order])
    needed = list[tuple[int, int]]()
    for place in places:
        # Reported when the batch is counted
        with contextlib.suppress(BatchError):
            batch = load_batch(path, place, column, storage)
            body = int(bodies_of(place))
            needed += [
                (body + offset, size) for offset, size in needed_ranges(batch, column, tokens=False)
            ]
    offsets, sizes = np.array(needed, np.int64).reshape(-1, 2).T.copy()
    request_ranges(storage, path, offsets, sizes)


def load_batch(path: str, place: np.void, column: Column, storage: Storage) -> Batch:
    """Read the message of a batch. Raises: BatchError."""
    metadata = storage.read(path, int(place["offset"]), int(place["metadata_bytes"]))
    return parse_batch(metadata, int(place["body_bytes"]), column)


def expect_ranges(
    batch: Batch, column: Column, body_bytes: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Guess where the needed buffers of batches are: at the same offsets as in the first batch.

    Compressed buffers vary in size, so some bytes around them are included.

    Args:
        batch: the first batch.
        body_bytes: int64 [num_batches], size of each batch's body, the first included.

    Returns: for each range the number of its batch, its first byte in the body, and its size:
        arrays of int64 [n]; all ranges are within the bodies.
    """
    needed = np.array(needed_ranges(batch, column, tokens=False), np.int64).reshape(-1, 2)
    starts = needed[:, 0]
    stops = needed.sum(axis=1)
    if len(needed) and batch.codec is not None:
        margin = 64 + int(stops[-1] - starts[0]) // 4
        starts = np.maximum(starts[:1] - margin, 0)
        stops = stops[-1:] + margin
    numbers = np.repeat(np.arange(len(body_bytes)), len(starts))
    all_starts = np.tile(starts, len(body_bytes))
    all_stops = np.tile(stops, len(body_bytes))
    if len(starts) and stops[-1] <= _MAX_SHORT_BYTES:
        all_starts[-len(starts) :] = 0
    all_stops = np.minimum(all_stops, body_bytes[numbers])
    inside = all_starts < all_stops
    return numbers[inside], all_starts[inside], (all_stops - all_starts)[inside]


def _expect_buffers(
    path: str, places: Array, column: Column, storage: Storage
) -> tuple[Int64s, Int64s]:
    """Return the expected offsets in the file, and the expected sizes, of the buffers of all
    batches. Both arrays are empty if the first message has not been requested yet."""
    first = places[0]
    if is_requested(storage, path, int(first["offset"]), int(first["metadata_bytes"])):
        # Reported when the batch is counted
        with contextlib.suppress(BatchError):
            batch = load_batch(path, first, column, storage)
            numbers, starts, sizes = expect_ranges(batch, column, places["body_bytes"])
            return bodies_of(places)[numbers] + starts, sizes
    return np.zeros(0, np.int64), np.zeros(0, np.int64)


def count_batches(path: str, places: Array, column: Column, storage: Storage) -> tuple[Array, int]:
    """Count the documents and tokens of record batches, from list offsets and validity bitmaps.

    Args:
        places: PLACE_DTYPE [num_batches].

    Returns: the blocks of batches that have rows, BLOCK_DTYPE [n]; and the number of bytes of
        bodies that were read.
    Raises: CorruptFileError; UnsupportedFileError for a batch that is too large.
    """
    request_batches(path, places, column, storage)
    blocks = np.zeros(len(places), BLOCK_DTYPE)
    scanned_bytes = 0
    for block, place in zip(blocks, places, strict=True):
        scanned_bytes += _count(path, column, place, block, storage)
    blocks = blocks[blocks["rows"] > 0]
    blocks["first_token"] = np.cumsum(blocks["tokens"]) - blocks["tokens"]
    return blocks, scanned_bytes


def _buffers(path: str, batch: Batch, place: np.void, storage: Storage) -> Buffers:
    body = int(bodies_of(place))
    return Buffers(
        batch, lambda offset, size: np.frombuffer(storage.read(path, body + offset, size), np.uint8)
    )


def _count(path: str, column: Column, place: np.void, block: np.void, storage: Storage) -> int:
    """Fill a batch's row of the block table; return the number of body bytes that were read."""
    offset = int(place["offset"])
    with locating(path, place):
        batch = load_batch(path, place, column, storage)
        buffers = _buffers(path, batch, place, storage)
        documents = find_documents(batch, column, buffers)
    needed = column_buffers(batch, column)
    stored = int(place["metadata_bytes"]) + int(batch.buffers["size"][needed].sum())
    decoded = sum(buffers.size(number) for number in needed)
    if max(stored, decoded) > MAX_BYTES:
        raise UnsupportedFileError(
            path,
            f"record batch of {batch.rows} rows has {max(stored, decoded)} bytes of tokens, more than {MAX_BYTES}; "
            "write smaller batches (max_chunksize of RecordBatchFileWriter.write_table)",
            offset=offset,
        )
    block["offset"] = offset
    block["stored_bytes"] = stored
    block["decoded_bytes"] = decoded
    block["rows"] = batch.rows
    block["tokens"] = documents.offsets[-1]
    block["ends"] = np.count_nonzero(np.diff(documents.offsets))
    block["flags"] = ENDS_AT_DOCUMENT_END
    return buffers.fetched_bytes
