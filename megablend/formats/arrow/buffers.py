"""The buffers of a record batch, decompressed.

Source: Arrow columnar format, "Compression".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from megablend.formats.arrow.message import Batch, BatchError
from megablend.formats.base import Array
from megablend.storage.base import Bytes

MAX_BYTES = (1 << 32) - 1
"""Block sizes are stored in 32 bits; no buffer of a block is larger."""

_NOT_COMPRESSED = b"\xff" * 8

Fetch = Callable[[int, int], Bytes]
"""A function that returns bytes of a batch's body: (offset in the body, size) -> uint8 [size]."""


class Buffers:
    """The buffers of one batch, each fetched when it is first needed. `fetched_bytes` counts the
    bytes that were requested."""

    def __init__(self, batch: Batch, fetch: Fetch) -> None:
        self._batch = batch
        self._fetch = fetch
        self._read: dict[int, Array] = {}
        self.fetched_bytes = 0

    def size(self, number: int) -> int:
        """Return the decompressed size of a buffer in bytes; a compressed buffer states it in its
        prefix. Raises: BatchError."""
        if number in self._read:
            return len(self._read[number])
        stored = int(self._batch.buffers[number]["size"])
        if self._batch.codec is None:
            return stored
        return _decompressed_size(self._load(number, min(stored, 8)), stored)

    def read(self, number: int) -> Array:
        """Return a buffer's decompressed bytes, uint8 [size], read-only. Raises: BatchError."""
        if number not in self._read:
            data = self._load(number, int(self._batch.buffers[number]["size"]))
            plain = self._batch.codec is None or not len(data)
            self._read[number] = data if plain else decompress(data, str(self._batch.codec))
        return self._read[number]

    def _load(self, number: int, size: int) -> Bytes:
        self.fetched_bytes += size
        return self._fetch(int(self._batch.buffers[number]["offset"]), size)


def decompress(stored: Bytes, codec: str) -> Array:
    """Decompress a buffer. It is stored as its decompressed size (int64; -1 if it is not
    compressed), followed by its data.

    Returns: uint8 [size], read-only.

    Raises: BatchError.
    """
    size = _decompressed_size(stored[:8], len(stored))
    if stored[:8].tobytes() == _NOT_COMPRESSED:
        return stored[8:]
    # One more byte, to detect a buffer that is longer than it states
    out = np.empty(size + 1, np.uint8)
    try:
        compressed = pa.BufferReader(pa.py_buffer(stored)[8:])
        num_read = pa.CompressedInputStream(compressed, codec).readinto(out)
    except (pa.ArrowException, OSError) as error:
        raise BatchError(f"cannot be decompressed ({codec}: {error})") from error
    if num_read != size:
        actual = "more" if num_read > size else num_read
        raise BatchError(
            f"has a {codec} buffer with a stated size of {size} bytes, which decompresses to {actual}"
        )
    out.flags.writeable = False
    return out[:size]


def _decompressed_size(start: Bytes, stored_bytes: int) -> int:
    """Return the decompressed size of a compressed buffer, given its first 8 bytes and its stored
    size. Raises: BatchError if the buffer is too short, or the size is invalid."""
    if not stored_bytes:
        return 0
    if stored_bytes < 8:
        raise BatchError(
            f"has a compressed buffer of {stored_bytes} bytes, which is too short for its size field"
        )
    prefix = start.tobytes()
    if prefix == _NOT_COMPRESSED:
        return stored_bytes - 8
    size = int.from_bytes(prefix, "little", signed=True)
    if not 0 <= size <= MAX_BYTES:
        raise BatchError(f"has a compressed buffer with an invalid uncompressed size: {size} bytes")
    return size
