"""Reads the headers of a stream's messages: where batches are small, whole portions of the file,
several at a time.

Each message gives the position of the next, so that reads of headers wait for each other. Over a
network that takes a round trip for each batch; small batches are read along faster than they are
passed over.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

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
