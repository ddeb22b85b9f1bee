"""The pipeline of block reads: some threads fetch bytes, others decode them, as many reads at a time as memory allows.

There is one fetching thread per request that a storage with synchronous reads may have in flight; a storage with an event loop
returns at once, so that these threads only open files. There is one decoding thread per CPU. Where no more threads fetch than
decode, as for local files, all threads do both, and decode what they have fetched: it is still in the CPU's caches, and no thread
has to be woken.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from megablend.arrays import Int64s
from megablend.blocks.block_read import BlockRead
from megablend.blocks.block_store import BlockStore
from megablend.errors import MegablendError
from megablend.formats.base import Array
from megablend.formats.decoded import DecodedBlocks
from megablend.prefetch.range_requests import RangeKey, RangeRequests, RequestedRanges
from megablend.prefetch.read_counts import ReadCounts, ReadMeter
from megablend.storage.waits import Waits
from megablend.system.failures import translate, translating

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Task:
    """A request for blocks."""

    ids: Int64s
    rows: Array
    """Their rows of the block table."""
    size: int
    """Bytes of memory that fetching and decoding take."""
    pieces: bool
    blocks: Future[DecodedBlocks | None] = field(default_factory=Future)
    read: BlockRead | None = None
    shared: list[RangeKey] = field(default_factory=list)
    """Ranges that it fetches for other tasks as well."""


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
        self._waits = Waits()
        self._requests = RangeRequests(store.storage, self._meter, self._waits)
        self._lock = threading.Lock()
        self._decodes_in_place = num_fetching <= num_decoding
        if self._decodes_in_place:
            self._fetching = self._decoding = self._make_threads(num_decoding, "megablend-read")
        else:
            self._fetching = self._make_threads(num_fetching, "megablend-fetch")
            self._decoding = self._make_threads(num_decoding, "megablend-decode")
        self._process = os.getpid()
        self._is_abandoned = False

    def submit(self, ids: Int64s, rows: Array, size: int, *, pieces: bool) -> Future[DecodedBlocks | None]:
        """Request blocks.

        Args:
            ids, rows, pieces: as in BlockStore.begin_read.
            size: bytes of memory that fetching and decoding them takes.

        Returns: a future of the blocks, with the exceptions of BlockStore.read; None where the interpreter is shutting down.
        """
        task = _Task(ids, rows, size, pieces)
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
        self._waits.cancel()
        self._fetching.shutdown(wait=True, cancel_futures=True)
        self._decoding.shutdown(wait=True, cancel_futures=True)

    def abandon(self) -> None:
        """Start no more reads, and cancel requests; the threads end when nobody refers to the pipeline.

        For the garbage collector, which may run in any thread, also one of the pipeline's own, and between any two instructions:
        it must not need a lock or wait for a thread.
        """
        self._is_abandoned = True
        self._waits.cancel_soon()

    def _make_threads(self, count: int, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=self._waits.enter)

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
                with translating(str(self._store.snapshot.folder)):
                    work(task)
            except BaseException as error:  # re-raised where the blocks are awaited
                self._finish(task, error)

        try:
            threads.submit(attempt)
        except (
            RuntimeError
        ) as error:  # closed in the meantime, the interpreter is shutting down, or no thread can be started
            if not next(turns):  # unless a thread has begun
                self._give_up(task, translate(error, str(self._store.snapshot.folder)))

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

    def _fetch(self, task: _Task) -> None:
        """Open the files of a task and fetch what it needs; called in a thread that may block."""
        task.read = self._store.begin_read(task.ids, task.rows, pieces=task.pieces)
        self._request(task, task.read)

    def _request(self, task: _Task, read: BlockRead) -> None:
        """Request all ranges that are known to be needed, and decode when there are no more."""
        while requested := self._requests.request(read.files, task.shared):
            if not requested.fetched.done():
                self._continue_when_fetched(task, read, requested)
                return
            requested.add_to_files()
        self._start_decoding(task, read)

    def _continue_when_fetched(self, task: _Task, read: BlockRead, requested: RequestedRanges) -> None:
        """Continue a task when its requests are complete."""

        def proceed(task: _Task) -> None:
            requested.add_to_files()
            self._request(task, read)

        requested.fetched.add_done_callback(lambda _: self._submit(self._fetching, proceed, task))

    def _start_decoding(self, task: _Task, read: BlockRead) -> None:
        if self._decodes_in_place:
            self._decode(task)
            return
        # Extra columns are read while blocks are decoded, so decoding may block on reads.
        self._submit(self._fetching if read.reads_more else self._decoding, self._decode, task)

    def _decode(self, task: _Task) -> None:
        assert task.read is not None
        started = perf_counter()
        blocks = task.read.decode()
        self._meter.add(ReadCounts(blocks=len(task.ids), decoding_seconds=perf_counter() - started))
        self._finish(task, blocks)

    def _finish(self, task: _Task, outcome: DecodedBlocks | BaseException) -> None:
        """Set the result of a task, and start others in its place."""
        task.read = None
        if task.shared:
            self._requests.release(task.shared)
        with self._lock:
            self._bytes -= task.size
        if isinstance(outcome, BaseException):
            task.blocks.set_exception(outcome)
        else:
            task.blocks.set_result(outcome)
        self._start_tasks()
