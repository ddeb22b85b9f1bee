"""A dry run of indexing: the code of the formats runs on a storage that counts requests and bytes.
Only the parts of a file that describe its content, such as its footer, are read, since they decide
what is read next. Reads of data are only counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from megablend.arrays import Int64s
from megablend.storage.base import Allocate, Bytes, Storage, allocate_bytes
from megablend.storage.objects.bucket import plan_requests
from megablend.storage.prefetched import PORTIONS_AHEAD, PrefetchedStorage
from megablend.storage.requested_reads import RequestedReads

_LONG_BYTES = 1 << 20
"""The size above which a read of a whole file is assumed to read data, not only a description of
data."""
_PROBE_BYTES = 64 << 10
"""The maximum size of a read that is carried out within a stream. Such small reads find out where
the stream continues."""


class LongReadError(Exception):
    """An exception that ends a dry run at the point where it would read data.

    By then, all following reads that are known have been counted. Indexing cannot continue without
    the data, so the caller suppresses this error and uses the counts so far.
    """


class DryStorage(PrefetchedStorage):
    """A storage that counts the requests and bytes that a PrefetchedStorage around `inner` would
    need, and sends only those requests that do not read data. Used by one thread.

    Raises, from any read: LongReadError, which the code that starts the dry run has to suppress.
    """

    def __init__(self, inner: Storage, reads: RequestedReads) -> None:
        super().__init__(inner, reads)
        self.requests = 0
        """The number of requests so far, whether they were sent or only counted."""
        self.bytes = 0
        """The number of bytes that these requests ask for."""
        self._uncounted = deque[tuple[str, Int64s, Int64s]]()
        """The portions of a stream that are not counted yet, each as (path, offsets, sizes)."""

    def stream(self, path: str, portions: Sequence[tuple[Int64s, Int64s]]) -> Iterator[int]:
        """See PrefetchedStorage.stream. The portions are counted, but not requested."""
        if self._is_streaming:  # within a larger portion, which contains these
            yield from range(len(portions))
            return
        self._uncounted.extend((path, offsets, sizes) for offsets, sizes in portions)
        self._is_streaming = True
        try:
            for number in range(len(portions)):
                # By the time this portion is processed, it and the next ones have been requested, if
                # memory allows. The rest will not be if the reader stops here.
                self._count_portions(num_left=len(portions) - number - PORTIONS_AHEAD)
                yield number
        finally:
            self._uncounted.clear()
            self._is_streaming = False

    def _start(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate = allocate_bytes
    ) -> Future[tuple[Bytes, Int64s]]:
        """Count a read, and carry it out unless it reads data; see PrefetchedStorage."""
        size = int(sizes.sum())
        if self._is_streaming:
            # The read is part of a portion, which is counted instead. A long read shows that all
            # portions will be read.
            if size > _PROBE_BYTES:
                self._count_portions(num_left=0)
                raise LongReadError(path)
        else:
            self._count(offsets, sizes)
            # A format that reads a whole file at once reads nothing after it
            if size > _LONG_BYTES and size == self.inner.stat(path).size:
                raise LongReadError(path)
        return super()._start(path, offsets, sizes, allocate)

    def _count_portions(self, num_left: int) -> None:
        """Count all uncounted portions of a stream except the last `num_left`."""
        while len(self._uncounted) > max(0, num_left):
            path, offsets, sizes = self._uncounted.popleft()
            self._count(*self._find_missing(path, offsets, sizes))

    def _count(self, offsets: Int64s, sizes: Int64s) -> None:
        """Count the requests for a list of ranges. Adjacent ranges are merged, and long ranges are
        split."""
        self.requests += len(plan_requests(offsets, sizes, np.cumsum(sizes) - sizes))
        self.bytes += int(sizes.sum())
