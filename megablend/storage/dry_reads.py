"""Reads that are counted, and made only if they are of a file's description: what indexing a
file takes is found by trying."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from megablend.arrays import Int64s
from megablend.storage.base import Allocate, Bytes, Storage
from megablend.storage.objects.bucket import plan_requests
from megablend.storage.prefetched import PORTIONS_AHEAD, PrefetchedStorage
from megablend.storage.requested_reads import RequestedReads

_LONG_BYTES = 1 << 20
"""Files that are read as a whole are data where they are longer."""
_PROBE_BYTES = 64 << 10
"""Reads within a stream of data up to this size are made: they find where it continues."""


class LongReadError(Exception):
    """Raised in place of a read of data, with which all that is known to follow has been
    counted."""


class DryStorage(PrefetchedStorage):
    """Counts requests and bytes as a PrefetchedStorage around `inner` makes
    them. Used by one thread.

    Raises, from any read: LongReadError.
    """

    def __init__(self, inner: Storage, reads: RequestedReads) -> None:
        super().__init__(inner, reads)
        self.requests = self.bytes = 0
        self._coming = deque[
            tuple[str, Int64s, Int64s]
        ]()  # portions of a stream that are not yet counted

    def stream(self, path: str, portions: Sequence[tuple[Int64s, Int64s]]) -> Iterator[int]:
        """See PrefetchedStorage.stream; nothing is requested."""
        if self._is_streaming:
            yield from range(len(portions))
            return
        self._coming.extend((path, *each) for each in portions)
        self._is_streaming = True
        try:
            for number in range(len(portions)):
                self._count_coming(len(portions) - number - PORTIONS_AHEAD)
                yield number
        finally:
            self._coming.clear()
            self._is_streaming = False

    def _start(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate | None = None
    ) -> Future[tuple[Bytes, Int64s]]:
        size = int(sizes.sum())
        if self._is_streaming and size > _PROBE_BYTES:
            self._count_coming(0)
            raise LongReadError(path)
        if not self._is_streaming:
            self._count(offsets, sizes)
            if size > _LONG_BYTES and size == self.inner.stat(path).size:
                raise LongReadError(path)
        return super()._start(path, offsets, sizes, allocate)

    def _count_coming(self, left: int) -> None:
        """Count the portions of a stream but the last `left`."""
        while len(self._coming) > max(0, left):
            self._count(*self._find_missing(*self._coming.popleft()))

    def _count(self, offsets: Int64s, sizes: Int64s) -> None:
        self.requests += len(plan_requests(offsets, sizes, np.cumsum(sizes) - sizes))
        self.bytes += int(sizes.sum())
