"""What reading took: counted where bytes are fetched and decoded, taken batch by batch."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, NamedTuple


class ReadCounts(NamedTuple):
    """Amounts that add up."""

    requests: int = 0
    """Ranges of a file that were fetched together count once."""
    bytes: int = 0
    """Stored bytes that were requested, before they are decompressed."""
    blocks: int = 0
    reading_seconds: float = 0.0
    """From each request to its bytes. Requests overlap, so the sum may exceed the time that passed."""
    decoding_seconds: float = 0.0
    """Summed over threads."""

    def plus(self, other: ReadCounts) -> ReadCounts:
        """Both together."""
        return ReadCounts(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]


class ReadMeter:
    """Adds up what the threads of a process read. Safe to share between threads."""

    def __init__(self) -> None:
        self._counts, self._lock = ReadCounts(), threading.Lock()

    def add(self, counts: ReadCounts) -> None:
        """Count something that was done."""
        with self._lock:
            self._counts = self._counts.plus(counts)

    def add_fetch(self, fetched: Future[Any], size: int, seconds: float) -> None:
        """Count a request of `size` bytes that has ended, unless it failed."""
        if not fetched.cancelled() and fetched.exception() is None:
            self.add(ReadCounts(requests=1, bytes=size, reading_seconds=seconds))

    def take(self) -> ReadCounts:
        """What was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, ReadCounts()
        return counts
