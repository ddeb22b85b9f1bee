"""The pipeline of block reads: some threads fetch bytes, others decode them. As many reads are in
progress as memory allows.

If a storage reads synchronously, there is one fetching thread (`megablend-fetch_N`) for each
request that may be in flight. If a storage has an event loop, requests return at once, and the
fetching threads only open files. There is one decoding thread (`megablend-decode_N`) per CPU, at
most 8 for a loader; decoding threads also plan windows. If the fetching threads are not more than
the decoding threads, as for local files, all threads (`megablend-read_N`) do both. Each decodes
what it has fetched, since these bytes are still in the CPU's caches, and no other thread has to be
woken.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, TypeVar

from megablend.errors import MegablendError
from megablend.formats.decoded import DecodedBlocks
from megablend.index.blocks.block_store import BlockStore
from megablend.prefetch.range_requests import RangeRequests, Requested, add_to_files
from megablend.prefetch.read_counts import ReadCounts, ReadMeter
from megablend.prefetch.reads import Read
from megablend.storage.waits import Waits
from megablend.system.failures import translate, translating

T = TypeVar("T")


class ReadPipeline:
    """A pipeline that fetches and decodes blocks in the order in which they are requested.

    Args:
        store: the blocks of the index.
        max_bytes: maximum memory for the reads in progress; a single read may exceed it.
        num_fetching, num_decoding: numbers of threads.
        pieces: whether blocks are decoded with the offsets of their pieces, as in BlockStore.read.
        meter: counts the reads.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        max_bytes: int,
        num_fetching: int,
        num_decoding: int,
        pieces: bool,
        meter: ReadMeter | None = None,
    ) -> None:
        self._meter = meter or ReadMeter()
        self._store = store
        self._max_bytes = max_bytes
        self._pieces = pieces
        self._bytes = 0  # memory for fetching and decoding the reads that were started
        self._waiting = deque[Read]()  # reads that were not started
        self._waits = Waits()
        self._requests = RangeRequests(store.storage, self._meter, self._waits)
        self._lock = threading.Lock()
        self._decodes_in_place = num_fetching <= num_decoding
        if self._decodes_in_place:
            self._fetching = self._make_threads(num_decoding, "megablend-read")
            self._decoding = self._fetching
        else:
            self._fetching = self._make_threads(num_fetching, "megablend-fetch")
            self._decoding = self._make_threads(num_decoding, "megablend-decode")
        self._process = os.getpid()
        self._is_abandoned = False

    def submit(self, read: Read) -> None:
        """Request the blocks of a read. The future `read.blocks` gets them, or an exception that
        BlockStore.read may raise."""
        with self._lock:
            self._waiting.append(read)
        self._start_reads()

    def compute(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call `work(*arguments)` in one of the decoding threads."""
        return self._decoding.submit(work, *arguments)

    def close(self) -> None:
        """Stop the threads and drop pending requests. In a forked child, which has none of the
        threads, do nothing."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._waiting.clear()
        self._waits.cancel()
        self._fetching.shutdown(wait=True, cancel_futures=True)
        self._decoding.shutdown(wait=True, cancel_futures=True)

    def abandon(self) -> None:
        """Start no more reads, and cancel requests. The threads end once nothing refers to the
        pipeline.

        This is for the garbage collector, which may run in any thread, including the pipeline's
        own, and between any two instructions: it must not need a lock or wait for a thread.
        """
        self._is_abandoned = True
        self._waits.cancel_soon()

    def _make_threads(self, count: int, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=self._waits.enter)

    def _start_reads(self) -> None:
        """Start as many of the waiting reads as memory allows."""
        started = list[Read]()
        with self._lock:
            while self._waiting and not self._is_abandoned:
                needed = self._bytes + self._waiting[0].reading
                # A read that alone exceeds the memory is started when no other one is under way
                if self._bytes and needed > self._max_bytes:
                    break
                started.append(self._waiting.popleft())
                self._bytes = needed
        for read in started:
            self._submit(self._fetching, self._fetch, read)

    def _submit(
        self, threads: ThreadPoolExecutor, work: Callable[[Read], None], read: Read
    ) -> None:
        """Submit work for a read to `threads`. If the work raises an error, the read ends with that
        error."""
        # If `threads.submit` fails, a thread may have begun nevertheless: whoever takes turn 0
        # handles the read
        turns = itertools.count()

        def attempt() -> None:
            if next(turns) > 0:
                return
            # Threads run on while the interpreter shuts down and waits for all of them: they must
            # not begin anything new
            if self._is_abandoned or not threading.main_thread().is_alive():
                self._give_up(read)
                return
            try:
                with translating(str(self._store.snapshot.folder)):
                    work(read)
            except BaseException as error:  # re-raised where the blocks are awaited
                self._finish(read, error)

        try:
            threads.submit(attempt)
        except RuntimeError as error:
            # It was closed meanwhile, the interpreter shuts down, or no thread can be started
            if next(turns) == 0:
                self._give_up(read, translate(error, str(self._store.snapshot.folder)))

    def _give_up(self, read: Read, error: MegablendError | None = None) -> None:
        """Drop a read and all waiting reads. Their blocks become None; if there is an error,
        waiting for the blocks raises it."""
        with self._lock:
            dropped = [read, *self._waiting]
            self._waiting.clear()
        for dropped_read in dropped:
            if error is None:
                dropped_read.blocks.set_result(None)
            else:
                dropped_read.blocks.set_exception(error)

    def _fetch(self, read: Read) -> None:
        """Open the files of a read and fetch what it needs; called in a thread that may block."""
        read.file_reads = self._store.begin_read(read.ids, read.rows)
        self._request(read)

    def _request(self, read: Read) -> None:
        """Request all ranges that are known to be needed, repeatedly, since the fetched bytes may
        show that more are needed. Then decode the read."""
        while True:
            requested = self._requests.request(read.file_reads, read.shared)
            if requested is None:
                break
            if not requested.done():
                self._continue_when_fetched(read, requested)
                return
            add_to_files(requested)
        if self._decodes_in_place:
            self._decode(read)
        elif self._store.reads_more(read.file_reads):
            # Extra columns are read while blocks are decoded, so decoding may block on reads
            self._submit(self._fetching, self._decode, read)
        else:
            self._submit(self._decoding, self._decode, read)

    def _continue_when_fetched(self, read: Read, requested: Requested) -> None:
        """Continue a read when its requests are complete."""

        # The callback must not refer to `requested`, which refers to the callback: such a cycle
        # would keep the fetched bytes in memory until the garbage collector runs
        def submit(fetched: Requested) -> None:
            def proceed(read: Read) -> None:
                add_to_files(fetched)
                self._request(read)

            self._submit(self._fetching, proceed, read)

        requested.add_done_callback(submit)

    def _decode(self, read: Read) -> None:
        """Decode the blocks of a read, whose ranges have all been fetched."""
        started = perf_counter()
        blocks = self._store.decode(read.ids, read.file_reads, pieces=self._pieces)
        self._meter.add(ReadCounts(blocks=len(read.ids), decoding_seconds=perf_counter() - started))
        self._finish(read, blocks)

    def _finish(self, read: Read, outcome: DecodedBlocks | BaseException) -> None:
        """Set the result of a read, and start other reads in its place."""
        read.file_reads = []
        if read.shared:
            self._requests.release(read.shared)
        with self._lock:
            self._bytes -= read.reading
        if isinstance(outcome, BaseException):
            read.blocks.set_exception(outcome)
        else:
            read.blocks.set_result(outcome)
        self._start_reads()
