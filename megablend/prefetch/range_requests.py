"""Requests of ranges by many reads. A range that several reads need is *shared*: it is requested
once, by the read that *owns* it, for which the others wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

from megablend.formats.fetch import FileRead, fetch_now, start_fetch
from megablend.prefetch.read_counts import ReadCounts, ReadMeter
from megablend.prefetch.reads import RangeKey
from megablend.storage.base import Storage
from megablend.storage.futures import call_now, forward_result, gather_futures
from megablend.storage.ranges import FetchedRanges, FileRanges
from megablend.storage.waits import Waits


@dataclass(frozen=True, slots=True, eq=False)
class RequestedRanges:
    """Ranges that were requested for files, pending or complete."""

    files: list[FileRead]
    fetched: Future[list[FetchedRanges]]
    """For each of `files`, the ranges that were requested for it."""

    def add_to_files(self) -> None:
        """Pass the complete ranges to the files. Raises: see Storage.read."""
        for file, fetched in zip(self.files, self.fetched.result(), strict=True):
            file.add(fetched)


_COMPLETE = RequestedRanges([], call_now(list))
"""Stands for ranges that were passed to their files already."""


class RangeRequests:
    """Requests to a storage, from any thread.

    Args:
        storage: the storage to which requests are made.
        meter: counts the requests.
        waits: receives requests in flight, and can cancel them.
    """

    def __init__(self, storage: Storage, meter: ReadMeter, waits: Waits) -> None:
        self._storage = storage
        self._meter = meter
        self._waits = waits
        self._shared: dict[RangeKey, Future[FetchedRanges]] = {}
        self._claiming = threading.Lock()

    def request(self, files: Sequence[FileRead], owned: list[RangeKey]) -> RequestedRanges | None:
        """Request the ranges that files need next; None if they need no more.

        Args:
            owned: receives the shared ranges that the caller's read owns from now on, and which
                it has to `release` when it is done.
        """
        with self._claiming:
            needed = [(file, ranges) for file in files for ranges in file.next_ranges()]
            claims = [self._claim(ranges, owned) for _, ranges in needed]
        if not needed:
            return None
        answers_at_once = all(
            self._storage.limits(ranges.path).is_synchronous for _, ranges in needed
        )
        if answers_at_once and not any(claims):
            self._fetch_now(needed)
            return _COMPLETE
        fetching = self._start([ranges for _, ranges in needed], claims)
        return RequestedRanges([file for file, _ in needed], gather_futures(fetching, list))

    def _fetch_now(self, needed: Sequence[tuple[FileRead, FileRanges]]) -> None:
        """Read ranges that no other read needs, in this thread, and pass them to their files."""
        started = perf_counter()
        for file, ranges in needed:
            file.add(fetch_now(ranges, self._storage))
        size = sum(int(ranges.sizes.sum()) for _, ranges in needed)
        self._meter.add(
            ReadCounts(requests=len(needed), bytes=size, reading_seconds=perf_counter() - started)
        )

    def release(self, owned: Sequence[RangeKey]) -> None:
        """Forget shared ranges whose owner is done: other reads may have to request them again."""
        with self._claiming:
            for key in owned:
                self._shared.pop(key, None)

    def _claim(self, ranges: FileRanges, owned: list[RangeKey]) -> _Claim | None:
        """Become the owner of shared ranges, or join the read that owns them; None for ranges that
        are not shared.

        The caller holds `_claiming`, and has found the ranges missing since it took that lock:
        otherwise the owner could finish in between, and the ranges would be requested again.
        """
        if not ranges.is_shared:
            return None
        key = (ranges.path, int(ranges.offsets[0]))
        existing = self._shared.get(key)
        if existing is not None:
            return _Claim(existing, is_owner=False)
        created = Future[FetchedRanges]()
        self._shared[key] = created
        owned.append(key)
        return _Claim(created, is_owner=True)

    def _start(
        self, requests: Sequence[FileRanges], claims: Sequence[_Claim | None]
    ) -> list[Future[FetchedRanges]]:
        """Request ranges from the storage, except those that another read owns; return what each
        of `requests` is awaited with."""
        fetching = list[Future[FetchedRanges]]()
        unrequested = [claim.future for claim in claims if claim and claim.is_owner]
        try:
            for ranges, claim in zip(requests, claims, strict=True):
                if claim is None:
                    fetching.append(self._request(ranges))
                    continue
                if claim.is_owner:
                    forward_result(self._request(ranges), claim.future)
                    unrequested.remove(claim.future)
                fetching.append(claim.future)
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


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    """The shared ranges that a read has."""

    future: Future[FetchedRanges]
    is_owner: bool
    """Whether the read itself requests the ranges."""
