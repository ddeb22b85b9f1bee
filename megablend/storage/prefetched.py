"""Ranges of files that are requested together,
before the code that needs them reads one after the other.

Code that indexes a file reads small ranges in turn: a footer, then what the footer refers
to. On a local disk that costs nothing; over a network each read waits for a round trip.
Such code announces what it will read as soon as that is known (`request_ranges`), and then
reads as it does on a local disk.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.storage.base import Allocate, Bytes, Storage
from megablend.storage.futures import call_now
from megablend.storage.head_and_tail import TAIL_BYTES, get_ends
from megablend.storage.ranges import merge_ranges
from megablend.storage.requested_reads import RequestedReads
from megablend.storage.wrapper import WrapperStorage

MAX_TAIL_BYTES = 1 << 20
"""Longest end of a file that `request_tail` requests."""
PORTIONS_AHEAD = 4
"""Portions of a file that are in flight or in memory at a time, as memory allows."""
_MAX_OVERLAPPING = 4
"""Of the small ranges that begin before a byte, how many are searched for one that contains it; what
is not found is read again."""
_LARGE_BYTES = 64 << 10
"""Ranges of at least this size are listed apart from small ones, many of which may begin within
them."""


class _Held(NamedTuple):
    """A range that was requested."""

    path: str
    start: int
    stop: int
    data: Future[tuple[Bytes, Int64s]]
    """The buffers of all ranges that were requested with this one."""
    number: int
    """Which of those ranges this one is."""


class PrefetchedStorage(WrapperStorage):
    """Serves reads from ranges that were requested before;
    other reads go to `inner`. Used by one thread.

    Args:
        reads: all that is requested is added to these.
    """

    def __init__(self, inner: Storage, reads: RequestedReads | None = None) -> None:
        super().__init__(inner)
        self._reads = reads or RequestedReads()
        self._held: dict[str, list[_Held]] = {}  # small ones, which are many
        self._large: list[_Held] = []
        self._is_streaming = False

    def request(self, path: str, offsets: Int64s, sizes: Int64s) -> None:
        """Request ranges, int64 [n] each, all at the same time.
        Errors are raised by the reads that need them."""
        self._request(path, offsets, sizes)

    def is_requested(self, path: str, offset: int, size: int) -> bool:
        """Return whether a read of this range needs no further request."""
        return self._cover(path, offset, size) is not None

    def stream(self, path: str, portions: Sequence[tuple[Int64s, Int64s]]) -> Iterator[int]:
        """Request large portions of a file, each while the one before it is being
        processed, as memory allows.

        Args:
            portions: the offsets and sizes of the ranges of each, int64 [n].

        Yields: the number of each portion, whose reads are served from memory until the next number
            is requested.
        """
        if self._is_streaming:  # within a larger portion, which contains these
            yield from range(len(portions))
            return
        held = deque[tuple[int, list[_Held]]]()
        self._is_streaming = True

        def hold(number: int, *, wait: bool) -> bool:
            offsets, sizes = portions[number]
            if not self._reads.reserve(int(sizes.sum()), wait=wait):
                return False
            held.append((int(sizes.sum()), self._request(path, offsets, sizes)))
            return True

        def release() -> None:
            size, ranges = held.popleft()
            for each in ranges:
                each.data.cancel()
                self._list_of(each).remove(each)
            self._reads.free(size)

        try:
            for number in range(len(portions)):
                last = min(number + PORTIONS_AHEAD, len(portions))
                while number + len(held) < last and hold(number + len(held), wait=not held):
                    pass
                yield number
                release()
        finally:
            self._is_streaming = False
            while held:
                release()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        out, begins = self.read_ranges(path, np.array([offset]), np.array([size]), _allocate)
        return out[begins[0] : begins[0] + size].tobytes()

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        covers = [
            self._cover(path, *each) for each in zip(offsets.tolist(), sizes.tolist(), strict=True)
        ]
        missing = np.array([each is None for each in covers], np.bool_)
        if missing.all():
            return self._start(path, offsets, sizes, allocate).result()
        rest = self._start(path, offsets[missing], sizes[missing]) if missing.any() else None
        ends = np.cumsum(sizes, dtype=np.int64)
        begins = ends - sizes
        out = allocate(int(ends[-1]))
        for cover, offset, begin, end in zip(
            covers, offsets.tolist(), begins.tolist(), ends.tolist(), strict=True
        ):
            if cover is not None:
                _copy(cover, offset, out[begin:end])
        if rest is not None:
            data, rest_begins = rest.result()
            numbers = np.flatnonzero(missing).tolist()
            for i, first in zip(numbers, rest_begins.tolist(), strict=True):
                out[int(begins[i]) : int(ends[i])] = data[first : first + int(sizes[i])]
        return out, begins

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch."""
        return call_now(self.read_ranges, path, offsets, sizes, allocate)

    def _start(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate | None = None
    ) -> Future[tuple[Bytes, Int64s]]:
        """Start a read by `inner`, which can be cancelled with all others."""
        read = self.inner.fetch(path, offsets, sizes, allocate or _allocate)
        self._reads.add(read)
        return read

    def _request(self, path: str, offsets: Int64s, sizes: Int64s) -> list[_Held]:
        """Request what is not yet requested; returns that."""
        starts, sizes = self._find_missing(path, offsets, sizes)
        if not len(starts):
            return []
        read = self._start(path, starts, sizes)
        ranges = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        added = [
            _Held(path, start, stop, read, number) for number, (start, stop) in enumerate(ranges)
        ]
        for each in added:
            bisect.insort(self._list_of(each), each, key=_start_of)
        return added

    def _find_missing(self, path: str, offsets: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s]:
        """Offsets and sizes, int64 [n], of what is not yet requested."""
        merged = merge_ranges(offsets, sizes, self.limits(path))
        runs = zip(merged.starts.tolist(), merged.stops.tolist(), strict=True)
        tail = self._find_tail(path)  # a range that ends in it is requested up to there
        parts = [(start, tail if start < tail < stop else stop) for start, stop in runs]
        missing = [
            each
            for each in parts
            if each[1] > each[0] and self._cover(path, each[0], each[1] - each[0]) is None
        ]
        starts, stops = np.array(missing, np.int64).reshape(-1, 2).T.copy()
        return starts, stops - starts

    def _list_of(self, held: _Held) -> list[_Held]:
        return self._large if held.stop - held.start >= _LARGE_BYTES else self._small_of(held.path)

    def _small_of(self, path: str) -> list[_Held]:
        """Return the small ranges of a file, sorted by start: at first those that the storage has read
        along with its state."""
        if path not in self._held:
            ends = get_ends(self.inner, path)
            read = [] if ends is None else [(0, ends.head), (ends.tail_start, ends.tail)]
            self._held[path] = [_hold(path, start, data) for start, data in read if data]
        return self._held[path]

    def _find_tail(self, path: str) -> int:
        """Where the known end of a file begins; -1 if it is not known."""
        ends = get_ends(self.inner, path)
        return ends.tail_start if ends is not None and ends.tail else -1

    def _cover(self, path: str, offset: int, size: int) -> list[_Held] | None:
        """Return requested ranges that together contain another one; None if there are none."""
        small = self._small_of(path)
        cover = list[_Held]()
        done = offset
        while done < offset + size:
            number = bisect.bisect_right(small, done, key=_start_of)
            nearest = small[max(0, number - _MAX_OVERLAPPING) : number]
            nearest += [each for each in self._large if each.path == path and each.start <= done]
            best = max(nearest, key=_stop_of, default=None)
            if best is None or best.stop <= done:
                return None
            cover.append(best)
            done = best.stop
        return cover if size > 0 else None


def request_ranges(
    storage: Storage, path: str, offsets: Sequence[int] | Int64s, sizes: Sequence[int] | Int64s
) -> None:
    """Announce that ranges will be read: a PrefetchedStorage requests them at once, any other
    storage does nothing.

    Args:
        offsets, sizes: int64 [n], in bytes; within the file.
    """
    if isinstance(storage, PrefetchedStorage) and len(offsets):
        storage.request(path, np.asarray(offsets, np.int64), np.asarray(sizes, np.int64))


def request_tail(storage: Storage, path: str, size: int) -> int:
    """Announce that the end of a file of `size` bytes will be read:
    a longer one for large files, whose footers are often larger.

    Returns: the number of bytes.
    """
    tail_bytes = min(size, max(TAIL_BYTES, min(size >> 10, MAX_TAIL_BYTES)))
    request_ranges(storage, path, [size - tail_bytes], [tail_bytes])
    return tail_bytes


def stream_portions(
    storage: Storage, path: str, portions: Sequence[tuple[Int64s, Int64s]]
) -> Iterator[int]:
    """See PrefetchedStorage.stream; with any other storage, just the numbers of the portions."""
    return (
        storage.stream(path, portions)
        if isinstance(storage, PrefetchedStorage)
        else iter(range(len(portions)))
    )


def is_prefetched(storage: Storage) -> bool:
    """Return whether it is worth announcing reads."""
    return isinstance(storage, PrefetchedStorage)


def is_requested(storage: Storage, path: str, offset: int, size: int) -> bool:
    """See PrefetchedStorage.is_requested; False in any other storage."""
    return isinstance(storage, PrefetchedStorage) and storage.is_requested(path, offset, size)


def _hold(path: str, start: int, data: bytes) -> _Held:
    """Return a range that was read before."""
    read = Future[tuple[Bytes, Int64s]]()
    read.set_result((np.frombuffer(data, np.uint8), np.zeros(1, np.int64)))
    return _Held(path, start, start + len(data), read, 0)


def _start_of(held: _Held) -> int:
    return held.start


def _stop_of(held: _Held) -> int:
    return held.stop


def _copy(cover: Sequence[_Held], offset: int, out: Bytes) -> None:
    """Copy bytes from `offset` on out of the ranges that contain them, after waiting for these."""
    done = 0
    for each in cover:
        data, begins = each.data.result()
        place = int(begins[each.number]) + offset + done - each.start
        part = data[place : place + min(len(out) - done, each.stop - offset - done)]
        out[done : done + len(part)] = part
        done += len(part)


def _allocate(size: int) -> Bytes:
    return np.empty(size, np.uint8)
