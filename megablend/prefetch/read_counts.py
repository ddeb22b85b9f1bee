"""Counters of reads, which are updated when bytes are fetched or decoded, and read per batch."""

from __future__ import annotations

import operator
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

from megablend.storage.process_counts import get_counts
from megablend.system.after_fork import unlock_in_children


class ReadCounts(NamedTuple):
    """Counters of reads; two of them can be added."""

    requests: int = 0
    """Number of requests of ranges; ranges of a file that are fetched together count as one
    request."""
    bytes: int = 0
    """Stored bytes that were requested, before decompression."""
    blocks: int = 0
    """Number of blocks that were decoded."""
    reading_seconds: float = 0.0
    """Time from each request to its response. Requests overlap, so the sum may exceed the elapsed
    time."""
    decoding_seconds: float = 0.0
    """Time spent on decoding, summed over threads."""
    masked_samples: int = 0
    """Number of samples whose loss mask is 0 because their bytes are damaged."""
    retries: int = 0
    """Number of requests to object stores and web servers that were sent again. This counter and
    those below cover all readers of the process."""
    mirror_bytes: int = 0
    """Bytes of mirrored files that were on this node's disk."""
    source_bytes: int = 0
    """Bytes of mirrored files that the node process got from the source while a reader waited, in
    whole pages. Bytes that the node process gets in advance, or for other nodes, are counted by the
    node process itself (`megablend node status`)."""
    peer_bytes: int = 0
    """Bytes of mirrored files that the node process got from other nodes while a reader waited."""
    direct_bytes: int = 0
    """Bytes of mirrored files that were read from the source without the mirror."""

    def plus(self, other: ReadCounts) -> ReadCounts:
        """Return the sum of these and other counters."""
        if other is NOTHING_READ:  # a fast path: most batches find all their blocks in memory
            return self
        return ReadCounts(*map(operator.add, self, other))


NOTHING_READ = ReadCounts()


class ReadMeter:
    """A meter that adds up the reads of a process's threads. It can be shared between threads, and
    used after a fork."""

    def __init__(self) -> None:
        self._counts = NOTHING_READ
        self.unlock_after_fork()
        unlock_in_children(self)

    def unlock_after_fork(self) -> None:
        """Replace the lock, which another thread may have held at the fork. Count from the present
        values of the process's counters, since these still include the parent's counts."""
        self._lock = threading.Lock()
        self._of_process = get_counts()

    def add(self, counts: ReadCounts) -> None:
        """Add counters."""
        with self._lock:
            self._counts = self._counts.plus(counts)

    def add_fetch(self, fetched: Future[Any], size: int, seconds: float) -> None:
        """Count a completed request of `size` bytes, unless it failed."""
        if not fetched.cancelled() and fetched.exception() is None:
            self.add(ReadCounts(requests=1, bytes=size, reading_seconds=seconds))

    def take(self) -> ReadCounts:
        """Return what was counted since the last call, and reset the meter."""
        if self._counts is NOTHING_READ and self._of_process is get_counts():
            return NOTHING_READ
        with self._lock:
            of_process = get_counts()
            counts = self._counts
            self._counts = NOTHING_READ
            added = of_process - self._of_process
            self._of_process = of_process
        return counts.plus(ReadCounts(**added))
