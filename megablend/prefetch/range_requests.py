"""Requests for ranges of files. A range that several reads need is *shared*: it is requested once,
by the read that *owns* it, and the other reads wait for that request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import TypeAlias

from megablend.formats.fetch import FileRead, fetch_now, start_fetch
from megablend.prefetch.read_counts import ReadCounts, ReadMeter
from megablend.prefetch.reads import RangeKey
from megablend.storage.base import Storage
from megablend.storage.futures import call_now, forward_result, gather_futures
from megablend.storage.ranges import FetchedRanges, FileRanges
from megablend.storage.waits import Waits

Requested: TypeAlias = Future[list[tuple[FileRead, FetchedRanges]]]
"""The result of requests: each range that was fetched, with the file read that needs it."""
_COMPLETE: Requested = call_now(list)
"""A request that is complete, for ranges that have already been added to their file reads."""


def add_to_files(requested: Requested) -> None:
    """Add fetched ranges to the file reads that need them. Raises: see Storage.read."""
    for file, fetched in requested.result():
        file.add(fetched)


class RangeRequests:
    """Sends requests for ranges to a storage. It can be used from any thread.

    Args:
        storage: the storage to which requests are sent.
        meter: counts the requests.
        waits: receives requests in flight, and can cancel them.
    """

    def __init__(self, storage: Storage, meter: ReadMeter, waits: Waits) -> None:
        self._storage = storage
        self._meter = meter
        self._waits = waits
        self._shared: dict[RangeKey, Future[FetchedRanges]] = {}
        self._claiming = threading.Lock()

    def request(self, files: Sequence[FileRead], owned: list[RangeKey]) -> Requested | None:
        """Request the ranges that file reads need next. Return None if they need no more.

        Args:
            owned: a list; the shared ranges that the caller's read owns from now on are added to
                it. The read must `release` them when it is done.
        """
        new = list[Future[FetchedRanges]]()
        with self._claiming:
            needed = [(file, ranges) for file in files for ranges in file.next_ranges()]
            shared = [self._claim(ranges, owned, new) for _, ranges in needed]
        if not needed:
            return None
        answers_at_once = all(
            self._storage.limits(ranges.path).is_synchronous for _, ranges in needed
        )
        if answers_at_once and not any(shared):
            self._fetch_now(needed)
            return _COMPLETE
        fetching = self._start([ranges for _, ranges in needed], shared, new)
        files = [file for file, _ in needed]
        return gather_futures(fetching, lambda fetched: list(zip(files, fetched, strict=True)))

    def _fetch_now(self, needed: Sequence[tuple[FileRead, FileRanges]]) -> None:
        """Read ranges that no other read needs, in this thread, and add them to their file
        reads."""
        started = perf_counter()
        for file, ranges in needed:
            file.add(fetch_now(ranges, self._storage))
        size = sum(int(ranges.sizes.sum()) for _, ranges in needed)
        self._meter.add(
            ReadCounts(requests=len(needed), bytes=size, reading_seconds=perf_counter() - started)
        )

    def release(self, owned: Sequence[RangeKey]) -> None:
        """Forget shared ranges whose owner is done. If another read needs them later, it requests
        them again."""
        with self._claiming:
            for key in owned:
                self._shared.pop(key, None)

    def _claim(
        self, ranges: FileRanges, owned: list[RangeKey], new: list[Future[FetchedRanges]]
    ) -> Future[FetchedRanges] | None:
        """Become the owner of shared ranges, or join the read that owns them. Return None for
        ranges that are not shared.

        The caller must hold the lock `_claiming`, and must have held it when it found that the
        ranges are missing. Otherwise the owner could finish in between, and the ranges would be
        requested again.

        Args:
            owned, new: lists to which the ranges' key and future are added if the caller becomes
                their owner.
        """
        if not ranges.is_shared:
            return None
        key = (ranges.path, int(ranges.offsets[0]))
        if key not in self._shared:
            self._shared[key] = Future()
            owned.append(key)
            new.append(self._shared[key])
        return self._shared[key]

    def _start(
        self,
        requests: Sequence[FileRanges],
        shared: Sequence[Future[FetchedRanges] | None],
        unrequested: list[Future[FetchedRanges]],
    ) -> list[Future[FetchedRanges]]:
        """Request ranges from the storage, except those that another read owns. Return, for each of
        `requests`, the future to wait for.

        Args:
            shared: the results of `_claim` for the requests.
            unrequested: the futures of ranges that the caller owns; removed as they are requested.
        """
        fetching = list[Future[FetchedRanges]]()
        try:
            for ranges, future in zip(requests, shared, strict=True):
                if future is None:
                    fetching.append(self._request(ranges))
                    continue
                if future in unrequested:
                    forward_result(self._request(ranges), future)
                    unrequested.remove(future)
                fetching.append(future)
        except BaseException as error:
            for future in unrequested:  # other reads may already wait for it
                future.set_exception(error)
            raise
        return fetching

    def _request(self, ranges: FileRanges) -> Future[FetchedRanges]:
        """Request ranges from the storage, and count them when they have arrived."""
        started = perf_counter()
        size = int(ranges.sizes.sum())
        fetched = start_fetch(ranges, self._storage)
        self._waits.add(fetched)
        fetched.add_done_callback(
            lambda done: self._meter.add_fetch(done, size, perf_counter() - started)
        )
        return fetched
