"""The pipeline of block reads: some threads fetch bytes, others decode them, as many reads at a time as memory allows.

There is one fetching thread per request that a storage with synchronous reads may have in flight; a storage with an event loop
returns at once, so that these threads only open files. There is one decoding thread per CPU. Where no more threads fetch than
decode, as for local files, a thread decodes what it has fetched: it is still in its CPU's caches, and no thread has to be woken.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from megablend.blocks.block_read import BlockRead
from megablend.blocks.block_store import BlockStore
from megablend.errors import MegablendError
from megablend.formats.decoded import DecodedBlocks
from megablend.formats.fetch import FileRead, start_fetch
from megablend.prefetch.read_counts import ReadCounts, ReadMeter
from megablend.storage.base import Int64s
from megablend.storage.futures import forward_result, gather_futures
from megablend.storage.ranges import FetchedRanges, FileRanges
from megablend.system.failures import translate, translating

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Task:
    """A request for blocks."""

    ids: Int64s
    size: int
    """Bytes of memory that fetching and decoding take."""
    pieces: bool
    blocks: Future[DecodedBlocks | None] = field(default_factory=Future)
    read: BlockRead | None = None
    shared: list[_Key] = field(default_factory=list)
    """Ranges that it fetches for other tasks as well."""


_Key = tuple[str, int]
"""Path and offset of a range that several tasks request."""


class ReadPipeline:
    """Fetches and decodes blocks in the order in which they are requested.

    Args:
        store: the blocks of the index.
        max_bytes: memory for fetching and decoding at a time; a single read may exceed it.
        num_fetching, num_decoding: numbers of threads.
        meter: counts the reads.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        max_bytes: int,
        num_fetching: int,
        num_decoding: int,
        meter: ReadMeter | None = None,
    ) -> None:
        self._meter = meter or ReadMeter()
        self._store, self._max_bytes = store, max_bytes
        self._bytes = 0
        self._waiting = deque[_Task]()
        self._shared: dict[_Key, Future[FetchedRanges]] = {}
        self._in_flight = set[Future[FetchedRanges]]()
        self._lock = threading.Lock()
        self._claiming = threading.Lock()
        self._fetching = ThreadPoolExecutor(num_fetching, thread_name_prefix="megablend-fetch")
        self._decoding = ThreadPoolExecutor(num_decoding, thread_name_prefix="megablend-decode")
        self._decodes_in_place = num_fetching <= num_decoding
        self._process = os.getpid()
        self._is_abandoned = False

    def submit(self, ids: Int64s, size: int, *, pieces: bool) -> Future[DecodedBlocks | None]:
        """Request blocks.

        Args:
            ids: int64 [n], as in BlockStore.read.
            size: bytes of memory that fetching and decoding them takes.
            pieces: as in BlockStore.read.

        Returns: a future of the blocks, with the exceptions of BlockStore.read; None where the interpreter is shutting down.
        """
        task = _Task(ids, size, pieces)
        with self._lock:
            self._waiting.append(task)
        self._start_tasks()
        return task.blocks

    def compute(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call `work(*arguments)` in one of the decoding threads."""
        return self._decoding.submit(work, *arguments)

    def close(self) -> None:
        """Stop the threads; pending requests are dropped. Does nothing in a forked child, which has none of the threads."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._waiting.clear()
        self._fetching.shutdown(wait=True, cancel_futures=True)
        for request in list(self._in_flight):  # of storages that do not wait; no more are made
            request.cancel()
        self._decoding.shutdown(wait=True, cancel_futures=True)

    def abandon(self) -> None:
        """Start no more reads; the threads end when those in progress are done and nobody refers to the pipeline.

        For the garbage collector, which may run in any thread, also one of the pipeline's own, and between any two instructions:
        it must not need a lock or wait for a thread.
        """
        self._is_abandoned = True

    def _start_tasks(self) -> None:
        """Start as many of the waiting tasks as memory allows."""
        started = list[_Task]()
        with self._lock:
            while (
                self._waiting
                and not self._is_abandoned
                and (not self._bytes or self._bytes + self._waiting[0].size <= self._max_bytes)
            ):
                started.append(self._waiting.popleft())
                self._bytes += started[-1].size
        for task in started:
            self._submit(self._fetching, self._fetch, task)

    def _submit(self, threads: ThreadPoolExecutor, work: Callable[[_Task], None], task: _Task) -> None:
        turns = itertools.count()  # whoever takes the first one handles the task

        def attempt() -> None:
            if next(turns):
                return None
            # A thread that is not the main one runs on while the interpreter shuts down, and waits for all threads.
            if self._is_abandoned or not threading.main_thread().is_alive():
                return self._give_up(task)
            try:
                with translating(str(self._store.generation.folder)):
                    work(task)
            except BaseException as error:  # re-raised where the blocks are awaited
                self._finish(task, error)

        try:
            threads.submit(attempt)
        except (
            RuntimeError
        ) as error:  # closed in the meantime, the interpreter is shutting down, or no thread can be started
            if not next(turns):  # unless a thread has begun
                self._give_up(task, translate(error, str(self._store.generation.folder)))

    def _give_up(self, task: _Task, error: MegablendError | None = None) -> None:
        """Drop this task and all waiting ones; with an error, that is what their blocks are awaited with."""
        with self._lock:
            tasks = [task, *self._waiting]
            self._waiting.clear()
        for each in tasks:
            if error is None:
                each.blocks.set_result(None)
            else:
                each.blocks.set_exception(error)

    def _fetch(self, task: _Task, fetched_ranges: _RequestedRanges | None = None) -> None:
        """Fetch all ranges that are known to be needed; called in a thread that may block.

        Args:
            fetched_ranges: completed requests for which the task has waited.
        """
        if task.read is None:
            task.read = self._store.begin_read(task.ids, pieces=task.pieces)
        while True:
            if fetched_ranges is not None:
                for file, fetched in zip(fetched_ranges.files, fetched_ranges.fetched.result(), strict=True):
                    file.add(fetched)
            with self._claiming:
                needed = [(file, ranges) for file in task.read.files for ranges in file.next_ranges()]
                claims = [self._claim(task, ranges) for _, ranges in needed]
            if not needed:
                break
            fetching = self._start_fetches([ranges for _, ranges in needed], claims)
            fetched_ranges = _RequestedRanges([file for file, _ in needed], gather_futures(fetching, list))
            if not fetched_ranges.fetched.done():
                self._continue_when_fetched(task, fetched_ranges)
                return
        if self._decodes_in_place:
            self._decode(task)
            return
        # Extra columns are read while blocks are decoded, so decoding may block on reads.
        self._submit(self._fetching if task.read.reads_more else self._decoding, self._decode, task)

    def _continue_when_fetched(self, task: _Task, requested: _RequestedRanges) -> None:
        """Continue a task when its requests are complete."""
        proceed = partial(self._fetch, fetched_ranges=requested)
        requested.fetched.add_done_callback(lambda _: self._submit(self._fetching, proceed, task))

    def _claim(self, task: _Task, ranges: FileRanges) -> _Claim | None:
        """Take over the request of ranges that several tasks need, or share that of another task; None for other ranges.

        The caller holds `_claiming`, and has found the ranges missing since it took it: otherwise the task that requested them
        could finish in between, and they would be requested again.
        """
        if not ranges.is_shared:
            return None
        key, created = (ranges.path, int(ranges.offsets[0])), Future[FetchedRanges]()
        if (existing := self._shared.setdefault(key, created)) is not created:
            return _Claim(existing, is_owner=False)
        task.shared.append(key)
        return _Claim(created, is_owner=True)

    def _start_fetches(
        self, requests: Sequence[FileRanges], claims: Sequence[_Claim | None]
    ) -> list[Future[FetchedRanges]]:
        """Request ranges from the storage, but for those that another task requests."""
        fetching, owned = list[Future[FetchedRanges]](), [each.future for each in claims if each and each.is_owner]
        try:
            for ranges, claim in zip(requests, claims, strict=True):
                if claim is None:
                    fetching.append(self._request(ranges))
                    continue
                if claim.is_owner:
                    forward_result(self._request(ranges), claim.future)
                    owned.remove(claim.future)
                fetching.append(claim.future)
        except BaseException as error:
            for future in owned:  # other tasks may already wait for them
                future.set_exception(error)
            raise
        return fetching

    def _request(self, ranges: FileRanges) -> Future[FetchedRanges]:
        started, size = perf_counter(), int(ranges.sizes.sum())
        fetched = start_fetch(ranges, self._store.storage)
        self._in_flight.add(fetched)
        fetched.add_done_callback(self._in_flight.discard)
        fetched.add_done_callback(lambda done: self._meter.add_fetch(done, size, perf_counter() - started))
        return fetched

    def _decode(self, task: _Task) -> None:
        assert task.read is not None
        started = perf_counter()
        blocks = task.read.decode()
        self._meter.add(ReadCounts(blocks=len(task.ids), decoding_seconds=perf_counter() - started))
        self._finish(task, blocks)

    def _finish(self, task: _Task, outcome: DecodedBlocks | BaseException) -> None:
        """Set the result of a task, and start others in its place."""
        task.read = None
        with self._claiming:
            for key in task.shared:
                self._shared.pop(key, None)
        with self._lock:
            self._bytes -= task.size
        if isinstance(outcome, BaseException):
            task.blocks.set_exception(outcome)
        else:
            task.blocks.set_result(outcome)
        self._start_tasks()


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    """A request that several tasks share."""

    future: Future[FetchedRanges]
    is_owner: bool
    """The task that holds the claim makes the request."""


@dataclass(frozen=True, slots=True, eq=False)
class _RequestedRanges:
    """Requested ranges, pending or complete."""

    files: list[FileRead]
    fetched: Future[list[FetchedRanges]]
    """The ranges that each of `files` requested."""
