"""Ranges of files that are requested together, before the code that needs them reads them one by
one.

Code that indexes a file reads small ranges one by one: first a footer, then the ranges that the
footer refers to. On a local disk that costs nothing; over a network each read waits for a round
trip. Such code announces its reads as soon as they are known (`request_ranges`), and then reads as
it does on a local disk.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.storage.base import Allocate, Bytes, Storage, allocate_bytes, read_range
from megablend.storage.futures import call_now
from megablend.storage.head_and_tail import TAIL_BYTES, get_ends
from megablend.storage.ranges import merge_ranges
from megablend.storage.requested_reads import RequestedReads
from megablend.storage.wrapper import WrapperStorage

MAX_TAIL_BYTES = 1 << 20
"""The maximum number of bytes of a file's end that `request_tail` requests."""
PORTIONS_AHEAD = 4
"""The maximum number of a file's portions that are in flight or in memory at a time."""
_MAX_OVERLAPPING = 4
"""To find a byte, this many of the small ranges that begin before it are searched. A byte that is
not found in them is read again."""
_LARGE_BYTES = 64 << 10
"""The minimum size of large ranges. They are listed separately, since many small ranges may begin
within a large one."""

_start_of = attrgetter("start")
_stop_of = attrgetter("stop")


class _Requested(NamedTuple):
    """A range that was requested, alone or together with others."""

    path: str
    start: int
    stop: int
    read: Future[tuple[Bytes, Int64s]]
    """The read of all ranges that were requested together. Its result has their bytes, and the
    start of each."""
    number: int
    """The number of this range among the ranges of `read`."""


class PrefetchedStorage(WrapperStorage):
    """A storage that serves reads from ranges that were requested before, and passes other reads on
    to `inner`. Used by one thread.

    Args:
        reads: collects all reads that this storage requests.
    """

    def __init__(self, inner: Storage, reads: RequestedReads | None = None) -> None:
        super().__init__(inner)
        self._reads = reads or RequestedReads()
        self._small: dict[str, list[_Requested]] = {}
        """The small ranges of each file, by path. Each list is sorted by the offsets of the
        ranges."""
        self._large: list[_Requested] = []
        """The large ranges of all files."""
        self._is_streaming = False
        """Whether the portions of a stream are being processed."""

    def is_requested(self, path: str, offset: int, size: int) -> bool:
        """Return whether a range can be read without a further request."""
        return self._cover(path, offset, size) is not None

    def stream(self, path: str, portions: Sequence[tuple[Int64s, Int64s]]) -> Iterator[int]:
        """Request large portions of a file. As far as memory allows, the next portions are
        requested while an earlier portion is being processed.

        Args:
            portions: for each portion, the offsets and the sizes of its ranges (int64 [n]).

        Yields: the number of each portion. Until the next number is requested, reads of this
            portion are served from memory.
        """
        if self._is_streaming:  # within a larger portion, which contains these
            yield from range(len(portions))
            return
        requested = deque[tuple[int, list[_Requested]]]()  # for each portion: its bytes and ranges
        self._is_streaming = True

        def request_portion(number: int, *, wait: bool) -> bool:
            offsets, sizes = portions[number]
            size = int(sizes.sum())
            if not self._reads.reserve(size, wait=wait):
                return False
            requested.append((size, self.request(path, offsets, sizes)))
            return True

        def release_first() -> None:
            size, ranges = requested.popleft()
            for part in ranges:
                part.read.cancel()
                self._list_of(part).remove(part)
            self._reads.free(size)

        try:
            for number in range(len(portions)):
                stop = min(number + PORTIONS_AHEAD, len(portions))
                for ahead in range(number + len(requested), stop):
                    # Only a stream that has reserved no memory may wait for some
                    if not request_portion(ahead, wait=not requested):
                        break
                yield number
                release_first()
        finally:
            self._is_streaming = False
            while requested:
                release_first()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        return read_range(self, path, offset, size)

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        covers = [
            self._cover(path, offset, size)
            for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
        ]
        is_missing = np.array([cover is None for cover in covers], np.bool_)
        if is_missing.all():
            return self._start(path, offsets, sizes, allocate).result()
        missing_read = None
        if is_missing.any():
            missing_read = self._start(path, offsets[is_missing], sizes[is_missing])
        ends = np.cumsum(sizes, dtype=np.int64)
        begins = ends - sizes
        out = allocate(int(ends[-1]))
        for cover, offset, begin, end in zip(
            covers, offsets.tolist(), begins.tolist(), ends.tolist(), strict=True
        ):
            if cover is not None:
                _copy(cover, offset, out[begin:end])
        if missing_read is not None:
            data, data_begins = missing_read.result()
            numbers = np.flatnonzero(is_missing).tolist()
            for i, begin in zip(numbers, data_begins.tolist(), strict=True):
                out[int(begins[i]) : int(ends[i])] = data[begin : begin + int(sizes[i])]
        return out, begins

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch."""
        return call_now(self.read_ranges, path, offsets, sizes, allocate)

    def _start(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate = allocate_bytes
    ) -> Future[tuple[Bytes, Int64s]]:
        """Start a read of `inner`. It can be cancelled together with all other reads."""
        read = self.inner.fetch(path, offsets, sizes, allocate)
        self._reads.add(read)
        return read

    def request(self, path: str, offsets: Int64s, sizes: Int64s) -> list[_Requested]:
        """Request ranges, all at the same time. Parts that have been requested before are left out.
        Errors are raised by the reads that need a range.

        Returns: the ranges that were requested.
        """
        starts, sizes = self._find_missing(path, offsets, sizes)
        if not len(starts):
            return []
        read = self._start(path, starts, sizes)
        bounds = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        requested = [
            _Requested(path, start, stop, read, number)
            for number, (start, stop) in enumerate(bounds)
        ]
        for part in requested:
            bisect.insort(self._list_of(part), part, key=_start_of)
        return requested

    def _find_missing(self, path: str, offsets: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s]:
        """Return the offsets and the sizes of the ranges that are not yet requested (int64 [n])."""
        merged = merge_ranges(offsets, sizes, self.limits(path))
        tail_start = self._find_tail(path)
        missing = list[tuple[int, int]]()
        for start, stop in zip(merged.starts.tolist(), merged.stops.tolist(), strict=True):
            # A range that ends in the known tail is requested up to the tail
            end = tail_start if start < tail_start < stop else stop
            if end > start and self._cover(path, start, end - start) is None:
                missing.append((start, end))
        starts, stops = np.array(missing, np.int64).reshape(-1, 2).T.copy()
        return starts, stops - starts

    def _list_of(self, requested: _Requested) -> list[_Requested]:
        """Return the list that a requested range belongs to."""
        is_large = requested.stop - requested.start >= _LARGE_BYTES
        return self._large if is_large else self._small_of(requested.path)

    def _small_of(self, path: str) -> list[_Requested]:
        """Return the small ranges of a file, sorted by offset. The first call adds the head and
        tail of the file, if `inner` has read them."""
        if path not in self._small:
            ends = get_ends(self.inner, path)
            known = [] if ends is None else [(0, ends.head), (ends.tail_start, ends.tail)]
            self._small[path] = [_as_requested(path, start, data) for start, data in known if data]
        return self._small[path]

    def _find_tail(self, path: str) -> int:
        """Return the offset of the first byte of a file's known tail; -1 if no tail is known."""
        ends = get_ends(self.inner, path)
        return ends.tail_start if ends is not None and ends.tail else -1

    def _cover(self, path: str, offset: int, size: int) -> list[_Requested] | None:
        """Return the requested ranges that together contain a given range; None if a part of it was
        not requested."""
        small = self._small_of(path)
        cover = list[_Requested]()
        covered_to = offset
        while covered_to < offset + size:
            number = bisect.bisect_right(small, covered_to, key=_start_of)
            possible = small[max(0, number - _MAX_OVERLAPPING) : number]
            for large in self._large:
                if large.path == path and large.start <= covered_to:
                    possible.append(large)
            longest = max(possible, key=_stop_of, default=None)
            if longest is None or longest.stop <= covered_to:
                return None
            cover.append(longest)
            covered_to = longest.stop
        return cover if size > 0 else None


def request_ranges(
    storage: Storage, path: str, offsets: Sequence[int] | Int64s, sizes: Sequence[int] | Int64s
) -> None:
    """Announce that ranges will be read. A PrefetchedStorage requests them at once; any other
    storage does nothing.

    Args:
        offsets, sizes: the offset and size of each range in bytes (int64 [n]), within the file.
    """
    if isinstance(storage, PrefetchedStorage) and len(offsets):
        storage.request(path, np.asarray(offsets, np.int64), np.asarray(sizes, np.int64))


def request_tail(storage: Storage, path: str, size: int) -> int:
    """Announce that the end of a file of `size` bytes will be read. For a large file, more bytes
    are requested, since its footer is often larger.

    Returns: the number of bytes that are requested.
    """
    tail_bytes = min(size, max(TAIL_BYTES, min(size >> 10, MAX_TAIL_BYTES)))
    request_ranges(storage, path, [size - tail_bytes], [tail_bytes])
    return tail_bytes


def stream_portions(
    storage: Storage, path: str, portions: Sequence[tuple[Int64s, Int64s]]
) -> Iterator[int]:
    """See PrefetchedStorage.stream. For any other storage, this only yields the numbers of the
    portions."""
    if isinstance(storage, PrefetchedStorage):
        return storage.stream(path, portions)
    return iter(range(len(portions)))


def is_requested(storage: Storage, path: str, offset: int, size: int) -> bool:
    """See PrefetchedStorage.is_requested; False for any other storage."""
    return isinstance(storage, PrefetchedStorage) and storage.is_requested(path, offset, size)


def _as_requested(path: str, start: int, data: bytes) -> _Requested:
    """Return bytes that are already known in the form of a requested range."""
    read = Future[tuple[Bytes, Int64s]]()
    read.set_result((np.frombuffer(data, np.uint8), np.zeros(1, np.int64)))
    return _Requested(path, start, start + len(data), read, 0)


def _copy(cover: Sequence[_Requested], offset: int, out: Bytes) -> None:
    """Fill `out` with the bytes of a file that begin at `offset`, after waiting for the reads of
    `cover`.

    Args:
        cover: requested ranges that together contain these bytes.
    """
    num_copied = 0
    for part in cover:
        data, begins = part.read.result()
        position = offset + num_copied
        begin = int(begins[part.number]) + position - part.start
        size = min(len(out) - num_copied, part.stop - position)
        out[num_copied : num_copied + size] = data[begin : begin + size]
        num_copied += size
