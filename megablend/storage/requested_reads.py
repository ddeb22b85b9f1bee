"""The reads that the threads of a process have requested from storages. They can be cancelled
together, and share a memory limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from megablend.storage.waits import Waits

T = TypeVar("T")
R = TypeVar("R")

_MAX_HELD_BYTES = 512 << 20
"""The maximum number of bytes of large ranges that a process keeps in memory, over all files."""


class RequestedReads(Waits):
    """The reads that the threads of a process have requested. Another thread can cancel them, and
    the memory for large ranges is limited."""

    def __init__(self) -> None:
        super().__init__()
        self._has_room = threading.Condition()
        self._bytes = 0
        """The number of bytes that are reserved."""

    def cancel(self) -> None:
        """Cancel all reads, and end the waits for memory: callers that wait for a read get a
        CancelledError."""
        try:
            super().cancel()
        finally:  # also if another interrupt ends the cancelling
            with self._has_room:
                self._has_room.notify_all()

    def reserve(self, size: int, *, wait: bool) -> bool:
        """Reserve memory. More than the limit can be reserved only while no other memory is
        reserved.

        Args:
            wait: whether to wait until there is enough memory. Only a caller that has not reserved
                any memory may wait.

        Returns: False if there is not enough memory, and `wait` is False.
        """
        with self._has_room:
            while self._bytes and self._bytes + size > _MAX_HELD_BYTES and not self._is_cancelled:
                if not wait:
                    return False
                self._has_room.wait()
            self._bytes += size
            return True

    def free(self, size: int) -> None:
        """Release reserved memory."""
        with self._has_room:
            self._bytes -= size
            self._has_room.notify_all()


def run_in_threads(
    work: Callable[[T, RequestedReads], R], items: Sequence[T], num_threads: int
) -> Iterator[tuple[T, R]]:
    """Apply `work` to items, `num_threads` at a time. With one thread, the calling thread does the
    work. After an error, and when the iterator is closed, pending reads are cancelled.

    Yields: each item with its result, in the order in which they complete.
    Raises: the errors that `work` raises.
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
