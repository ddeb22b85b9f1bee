"""A dry run of indexing: how many requests and bytes it takes is found by running the code of the
formats, on a storage that counts what it is asked for. It reads only what describes a file, such as
its footer, for that decides what is read next; of data it is enough to know how much would be read.
"""

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
"""A read of a whole file that is larger than this reads data, not only what describes the file."""
_PROBE_BYTES = 64 << 10
"""Within a stream, reads of up to this many bytes are made: they find where it continues."""


class LongReadError(Exception):
    """Ends a dry run at the point at which it would read data.

    All that is known to follow has been counted by then. The code that indexes cannot go on without
    the data; its caller suppresses this error, and takes the counts so far as the result.
    """


class DryStorage(PrefetchedStorage):
    """Counts the requests and bytes that a PrefetchedStorage around `inner` would take, and makes
    only those that do not read data. Used by one thread.

    Raises, from any read: LongReadError, which the caller of the code that reads has to suppress.
    """

    def __init__(self, inner: Storage, reads: RequestedReads) -> None:
        super().__init__(inner, reads)
        self.requests = 0
        self.bytes = 0
        # Portions of a stream that are not counted yet: path, offsets and sizes
        self._uncounted = deque[tuple[str, Int64s, Int64s]]()

    def stream(self, path: str, portions: Sequence[tuple[Int64s, Int64s]]) -> Iterator[int]:
        """See PrefetchedStorage.stream; nothing is requested."""
        if self._is_streaming:  # within a larger portion, which contains these
            yield from range(len(portions))
            return
        self._uncounted.extend((path, *each) for each in portions)
        self._is_streaming = True
        try:
            for number in range(len(portions)):
                # What is requested by the time this portion is processed, if memory allows: it and
                # the next ones. The rest is not, should the reader stop here.
                self._count_portions(but_last=len(portions) - number - PORTIONS_AHEAD)
                yield number
        finally:
            self._uncounted.clear()
            self._is_streaming = False

    def _start(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate | None = None
    ) -> Future[tuple[Bytes, Int64s]]:
        """Count a read, and make it unless it is one of data; see PrefetchedStorage."""
        size = int(sizes.sum())
        if self._is_streaming:
            # Its bytes are those of the portions, which are counted instead. A long read shows that
            # all of them will be read.
            if size > _PROBE_BYTES:
                self._count_portions(but_last=0)
                raise LongReadError(path)
        else:
            self._count(offsets, sizes)
            # A format that reads a whole file at once reads nothing after it
            if size > _LONG_BYTES and size == self.inner.stat(path).size:
                raise LongReadError(path)
        return super()._start(path, offsets, sizes, allocate)

    def _count_portions(self, but_last: int) -> None:
        """Count the portions of a stream that are not counted yet, except for the last ones.

        Args:
            but_last: how many are left out at the end.
        """
        while len(self._uncounted) > max(0, but_last):
            self._count(*self._find_missing(*self._uncounted.popleft()))

    def _count(self, offsets: Int64s, sizes: Int64s) -> None:
        """Count the requests that ranges are joined or cut into."""
        self.requests += len(plan_requests(offsets, sizes, np.cumsum(sizes) - sizes))
        self.bytes += int(sizes.sum())
