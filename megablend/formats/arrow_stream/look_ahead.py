"""How far ahead a stream is read whose messages each give only the position of the next.

One request a message takes a round trip each. Where messages are large, that is less than reading
what is between them; where they are small, it is faster to request large portions of the file, one
while the other is looked through, though they contain data that indexing does not need.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megablend.storage.base import Storage
from megablend.storage.prefetched import stream_portions

PORTION_BYTES = 4 << 20
"""What is requested at a time where messages are small."""
SMALL_BYTES = 256 << 10
"""A message with its body is small up to this: less is transferred in about the time of a round
trip."""
_EXPECTED_AFTER = 4
"""Small messages in a row after which more are expected."""


class LookAhead:
    """Reads the messages of a file from its beginning to its end: only the metadata of large ones,
    whose bodies are skipped, but all of the file where messages are small.

    Args:
        size: bytes of the file.
    """

    def __init__(self, path: str, size: int, storage: Storage) -> None:
        self._path = path
        self._size = size
        self._storage = storage
        self._num_small = 0
        """Small messages in a row before the next one."""
        self._portions: Iterator[int] | None = None
        """Requests all of the file from `_begin` on, portion by portion; None while only what is
        needed is read."""
        self._begin = 0
        self._stop = 0
        """Where the last portion ends that was asked for."""

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from an offset on; offsets do not decrease. Raises: as Storage.read does."""
        while self._portions is not None and offset >= self._stop:
            self._stop = min(self._size, self._begin + (next(self._portions) + 1) * PORTION_BYTES)
        return self._storage.read(self._path, offset, size)

    def pass_message(self, offset: int, size: int) -> None:
        """The message of `size` bytes before `offset` is done; decides how those after it are
        read."""
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
        """Drop what was requested and not read."""
        if self._portions is not None and hasattr(self._portions, "close"):
            self._portions.close()
        self._portions = None
