"""What the threads of a process have requested from storages:
cancelled together, and within a limit of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

from megablend.arrays import Int64s
from megablend.storage.base import Bytes

T = TypeVar("T")
R = TypeVar("R")

MAX_HELD_BYTES = 512 << 20
"""Limit for the large ranges that a process keeps in memory, over all files."""


class RequestedReads:
    """What the threads of a process request: can be cancelled by another thread, and limits the
    memory for large ranges."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._lock = threading.RLock()  # a future that is already done calls back at once
        self._has_room = threading.Condition(self._lock)
        self._pending = set[Future[tuple[Bytes, Int64s]]]()
        self._is_cancelled = False
        self._bytes = 0
        self._max_bytes = max_bytes

    def add(self, read: Future[tuple[Bytes, Int64s]]) -> None:
        """Add a read that is in flight, so that `cancel` cancels it."""
        with self._lock:
            if not self._is_cancelled:
                self._pending.add(read)
                read.add_done_callback(self._remove)
                return
        read.cancel()

    def _remove(self, read: Future[tuple[Bytes, Int64s]]) -> None:
        with self._lock:
            self._pending.discard(read)

    def cancel(self) -> None:
        """Cancel all reads: whoever waits for one gets a CancelledError."""
        with self._lock:
            self._is_cancelled = True
            pending = list(self._pending)
            self._has_room.notify_all()
        for read in pending:
            read.cancel()

    def reserve(self, size: int, *, wait: bool) -> bool:
        """Reserve memory; a portion larger than the limit gets it when nothing else is held.

        Args:
            wait: wait until there is enough, which only a caller that holds none may do; otherwise
                return False at once.
        """
        with self._lock:
            while self._bytes and self._bytes + size > self._max_bytes and not self._is_cancelled:
                if not wait:
                    return False
                self._has_room.wait()
            self._bytes += size
            return True

    def free(self, size: int) -> None:
        """Return reserved memory."""
        with self._lock:
            self._bytes -= size
            self._has_room.notify_all()


def run_in_threads(
    work: Callable[[T, RequestedReads], R], items: Sequence[T], num_threads: int
) -> Iterator[tuple[T, R]]:
    """Apply `work` to items, `num_threads` at a time; with one thread, in the caller. After an
    error, and when the iterator is closed, what was requested of storages is cancelled.

    Yields: each item with its result, as they are done.
    Raises: what `work` raises.
    """
    reads = RequestedReads()
    if num_threads < 2 or len(items) < 2:
        for item in items:
            yield item, work(item, reads)
        return
    with ThreadPoolExecutor(
        min(num_threads, len(items)), thread_name_prefix="megablend-files"
    ) as threads:
        running = {threads.submit(work, item, reads): item for item in items}
        try:
            for done in as_completed(running):
                yield running.pop(done), done.result()
        finally:
            reads.cancel()
            threads.shutdown(wait=False, cancel_futures=True)
