"""Reads of blocks on their way: bytes are fetched by some threads, decoded by others, as many at a time as memory allows.

Fetching has a thread for each request that a storage of synchronous reads may have in flight; a storage with an event loop
returns at once, and these threads only open files. Decoding has a thread a CPU.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from megablend.blocks.block_read import BlockRead
from megablend.blocks.block_store import BlockStore
from megablend.formats.decoded import DecodedBlocks
from megablend.formats.fetch import FileRead, start_fetch
from megablend.prefetch.read_counts import ReadCounts, ReadMeter
from megablend.storage.base import Int64s
from megablend.storage.futures import forward_result, gather_futures
from megablend.storage.ranges import FetchedRanges, FileRanges
from megablend.system.failures import translating

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Task:
    """Blocks that somebody waits for."""

    ids: Int64s
    size: int
    """Bytes that fetching and decoding take."""
    pieces: bool
    blocks: Future[DecodedBlocks | None] = field(default_factory=Future)
    read: BlockRead | None = None
    shared: list[_Key] = field(default_factory=list)
    """What it fetches for others, too."""


_Key = tuple[str, int]
"""Path and offset of a range that several reads ask for."""


class ReadPipeline:
    """Fetches and decodes blocks in the order in which they are asked for.

    Args:
        store: whose blocks they are.
        max_bytes: what fetching and decoding may take at a time; one read is made whatever it takes.
        num_fetching, num_decoding: threads.
        meter: counts what is done; one of its own where absent.
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
        self._lock = threading.Lock()
        self._fetching = ThreadPoolExecutor(num_fetching, thread_name_prefix="megablend-fetch")
        self._decoding = ThreadPoolExecutor(num_decoding, thread_name_prefix="megablend-decode")
        self._process = os.getpid()

    def submit(self, ids: Int64s, size: int, *, pieces: bool) -> Future[DecodedBlocks | None]:
        """Ask for blocks.

        Args:
            ids: int64 [n], as of BlockStore.read.
            size: bytes that fetching and decoding them takes for a while.
            pieces: as of BlockStore.read.

        Returns: the blocks, or what BlockStore.read would raise; None where the interpreter is about to end.
        """
        task = _Task(ids, size, pieces)
        with self._lock:
            self._waiting.append(task)
        self._start_tasks()
        return task.blocks

    def compute(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """What `work` makes of arguments, by a thread that also decodes."""
        return self._decoding.submit(work, *arguments)

    def close(self) -> None:
        """Stop the threads; nothing that was asked for and is not here will come. A forked child does not have them."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._waiting.clear()
        for threads in (self._fetching, self._decoding):
            threads.shutdown(wait=True, cancel_futures=True)

    def _start_tasks(self) -> None:
        """Begin with as many of the waiting tasks as there is room for."""
        started = list[_Task]()
        with self._lock:
            while self._waiting and (not self._bytes or self._bytes + self._waiting[0].size <= self._max_bytes):
                started.append(self._waiting.popleft())
                self._bytes += started[-1].size
        for task in started:
            self._submit(self._fetching, self._fetch, task)

    def _submit(self, threads: ThreadPoolExecutor, work: Callable[[_Task], None], task: _Task) -> None:
        def attempt() -> None:
            if not threading.main_thread().is_alive():  # the interpreter is about to end, and waits for all threads
                return self._give_up(task)
            try:
                with translating(str(self._store.generation.folder)):
                    work(task)
            except BaseException as error:  # for whoever waits for the blocks
                self._finish(task, error)

        try:
            threads.submit(attempt)
        except RuntimeError:  # closed meanwhile, or the interpreter is about to end
            self._give_up(task)

    def _give_up(self, task: _Task) -> None:
        """Neither this task nor one that waits is worked on any more."""
        with self._lock:
            tasks = [task, *self._waiting]
            self._waiting.clear()
        for each in tasks:
            each.blocks.set_result(None)

    def _fetch(self, task: _Task, came: _Came | None = None) -> None:
        """Fetch all that is known to be needed; in a thread that may wait for it.

        Args:
            came: what was waited for elsewhere.
        """
        if task.read is None:
            task.read = self._store.begin_read(task.ids, pieces=task.pieces)
        while True:
            if came is not None:
                for file, fetched in zip(came.files, came.fetched.result(), strict=True):
                    file.fetched.append(fetched)
            asked = [(file, ranges) for file in task.read.files for ranges in file.next_ranges()]
            if not asked:
                break
            fetching = [self._start_fetch(task, ranges) for _, ranges in asked]
            came = _Came([file for file, _ in asked], gather_futures(fetching, list))
            if not came.fetched.done():
                self._fetch_on(task, came)
                return
        # Extra columns are read while blocks are decoded: that waits for bytes, too.
        self._submit(self._fetching if task.read.reads_more else self._decoding, self._decode, task)

    def _fetch_on(self, task: _Task, came: _Came) -> None:
        """Go on with a task when what it asked for is here."""
        go_on = partial(self._fetch, came=came)
        came.fetched.add_done_callback(lambda _: self._submit(self._fetching, go_on, task))

    def _start_fetch(self, task: _Task, ranges: FileRanges) -> Future[FetchedRanges]:
        """Ask the storage for ranges; what another task has asked for is waited for with it."""
        if not ranges.is_shared:
            return self._request(ranges)
        key, mine = (ranges.path, int(ranges.offsets[0])), Future[FetchedRanges]()
        with self._lock:
            if (known := self._shared.setdefault(key, mine)) is not mine:
                return known
            task.shared.append(key)
        try:
            forward_result(self._request(ranges), mine)
        except BaseException as error:  # others may wait for it by now
            mine.set_exception(error)
        return mine

    def _request(self, ranges: FileRanges) -> Future[FetchedRanges]:
        started, size = perf_counter(), int(ranges.sizes.sum())
        fetched = start_fetch(ranges, self._store.storage)
        fetched.add_done_callback(lambda done: self._meter.add_fetch(done, size, perf_counter() - started))
        return fetched

    def _decode(self, task: _Task) -> None:
        assert task.read is not None
        started = perf_counter()
        found = task.read.decode()
        self._meter.add(ReadCounts(blocks=len(task.ids), decoding_seconds=perf_counter() - started))
        self._finish(task, found)

    def _finish(self, task: _Task, found: DecodedBlocks | BaseException) -> None:
        """Hand over what became of a task, and begin with others in its place."""
        task.read = None
        with self._lock:
            self._bytes -= task.size
            for key in task.shared:
                self._shared.pop(key, None)
        if isinstance(found, BaseException):
            task.blocks.set_exception(found)
        else:
            task.blocks.set_result(found)
        self._start_tasks()


@dataclass(frozen=True, slots=True, eq=False)
class _Came:
    """What was asked for, and is on its way or here."""

    files: list[FileRead]
    fetched: Future[list[FetchedRanges]]
    """For each of `files` what it asked for."""
