"""Read the messages of a stream, each of which gives only the position of the next.

Each request for a message takes a round trip. If messages are large, that is faster than reading
their bodies as well. If they are small, it is faster to request large portions of the file, and to
parse the messages of one portion while the next one is fetched, although indexing does not need all
of the data.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megablend.storage.base import Storage
from megablend.storage.prefetched import stream_portions

PORTION_BYTES = 4 << 20
"""Number of bytes that are requested at a time if messages are small."""
SMALL_BYTES = 256 << 10
"""A message is small if it and its body together have fewer bytes than this. The transfer of so
many bytes takes about as long as a round trip."""
_EXPECTED_AFTER = 4
"""Number of small messages in a row after which more are expected."""


class LookAhead:
    """A reader of a file's messages from first to last. Of large messages it reads only the
    metadata and skips the bodies; while messages are small, it reads all bytes of the file.

    Args:
        size: size of the file in bytes.
    """

    def __init__(self, path: str, size: int, storage: Storage) -> None:
        self._path = path
        self._size = size
        self._storage = storage
        self._num_small = 0
        """Number of small messages in a row before the next one."""
        self._portions: Iterator[int] | None = None
        """An iterator that requests the file from `_begin` on, and yields the number of each
        portion that has arrived; None while only metadata is read."""
        self._begin = 0
        """Offset at which the first portion begins."""
        self._stop = 0
        """Offset at which the last requested portion ends."""

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset` on. The offset must not be lower than in the last call.
        Raises: the same errors as Storage.read."""
        while self._portions is not None and offset >= self._stop:
            self._stop = min(self._size, self._begin + (next(self._portions) + 1) * PORTION_BYTES)
        return self._storage.read(self._path, offset, size)

    def pass_message(self, offset: int, size: int) -> None:
        """Decide how to read messages from `offset` on, given the size of the previous message."""
        self._num_small = self._num_small + 1 if size < SMALL_BYTES else 0
        if not self._num_small:
            self.close()
        elif self._num_small >= _EXPECTED_AFTER and self._portions is None:
            self._begin = offset
            self._stop = offset
            starts = np.arange(offset, self._size, PORTION_BYTES)
            sizes = np.minimum(PORTION_BYTES, self._size - starts)
            portions = [(starts[i : i + 1], sizes[i : i + 1]) for i in range(len(starts))]
            self._portions = iter(stream_portions(self._storage, self._path, portions))

    def close(self) -> None:
        """Drop portions that were requested but not read."""
        if self._portions is not None and hasattr(self._portions, "close"):
            self._portions.close()
        self._portions = None
