"""One rank's share of a build: its jobs in threads, as many at once as fit in its memory, most expensive first.

While threads work, all ranks exchange heartbeats a few times a second: their progress, and what other ranks wait for (see parts).
So an error or exit of one rank is known to all at the next heartbeat, however long their own work would take.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megablend.distributed.base import Communicator
from megablend.index.build import Progress
from megablend.megatron.cache_builder.artefacts import names_in, problem_with
from megablend.megatron.cache_builder.build_artefact import build_blend, build_dataset, build_divided
from megablend.megatron.cache_builder.build_small import MAX_TOGETHER, TOGETHER_BYTES, build_small, is_small
from megablend.megatron.cache_builder.commit import Commits, StoppedError
from megablend.megatron.cache_builder.cost import PIECE_BYTES, CostEstimate
from megablend.megatron.cache_builder.length_reader import LengthReader
from megablend.megatron.cache_builder.parts import Begun, Message, Parts
from megablend.megatron.cache_builder.schedule import Assignment, MemoryGate
from megablend.megatron.cache_builder.work_plan import BlendJob, DatasetJob, Job
from megablend.megatron.request.request import CacheRequest

_TICK_SECONDS = 0.2
_WIND_DOWN_SECONDS = 1.0
"""How long an error is held back so that the other threads of its rank can remove what they have begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heartbeat:
    """What a rank sends to all ranks at regular intervals."""

    finished: bool
    files: int
    bytes: int
    messages: list[Message]


def build_share(
    jobs: Sequence[Job],
    needs: Sequence[CostEstimate],
    share: Assignment,
    request: CacheRequest,
    cache: Path,
    launch: Communicator,
    lengths: LengthReader,
    progress: Callable[[Progress], None],
) -> None:
    """Build the jobs of `share`, and wait for the other ranks.

    Args:
        jobs: of all ranks, and their `needs`.
        progress: called on rank 0 with what all ranks have done.

    Raises: DataError, CacheError of the first job that fails; those that have begun stop at their next piece.
    """
    crew = _WorkerPool(jobs, needs, share, request, cache, lengths)
    num_bytes = sum(job.artefact.nbytes for job in jobs)
    try:
        finished = False
        while not finished:
            ticks = launch.allgather(crew.tick())
            for tick in ticks:
                for message in tick.messages:
                    crew.parts.receive(message)
            finished = all(tick.finished for tick in ticks)
            if launch.rank == 0:
                files, size = sum(tick.files for tick in ticks), sum(tick.bytes for tick in ticks)
                progress(Progress(files=files, num_files=len(jobs), bytes=size, num_bytes=num_bytes))
    finally:
        crew.end()


class _WorkerPool:
    """The threads of a rank."""

    def __init__(
        self,
        jobs: Sequence[Job],
        needs: Sequence[CostEstimate],
        share: Assignment,
        request: CacheRequest,
        cache: Path,
        lengths: LengthReader,
    ) -> None:
        self._jobs, self._needs, self._share, self._request, self._cache = jobs, needs, share, request, cache
        self._lengths = lengths
        self._gate = MemoryGate(share.memory)
        self._total_cost = sum(needs[number].cost for number in share.jobs)
        self._wake, self._stop, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self.parts = Parts(
            jobs, share.divided, share.part, share.num_parts, request, lengths, self._wake.set, self._stop
        )
        nbytes = sum([jobs[number].artefact.nbytes for number in share.jobs])
        self._commits = Commits(cache, self._stop, nbytes) if share.jobs else None
        self._names = names_in(cache)  # another build may have made some while this one waited for the lock
        self._left, self._unfinished = deque(share.jobs), len(share.jobs)
        self._small = {number for number in share.jobs if number not in share.divided and is_small(jobs[number])}
        self._files, self._bytes, self._finished = 0, 0, False
        self._workers = min(share.workers, len(share.jobs))
        self._pool = ThreadPoolExecutor(max(1, self._workers))
        self._futures = [self._pool.submit(self._work) for _ in range(self._workers)]
        for future in self._futures:
            future.add_done_callback(lambda _: self._wake.set())

    def tick(self) -> _Heartbeat:
        """Wait a little, or until there is something to send. Raises: the error of a thread."""
        if not self._finished:
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
        done = [future for future in self._futures if future.done()]
        for future in done:
            future.result()
        messages = self.parts.take_messages()
        self._finished = len(done) == len(self._futures) and not self.parts.left and not messages
        return _Heartbeat(finished=self._finished, files=self._files, bytes=self._bytes, messages=messages)

    def end(self) -> None:
        """Stop the threads that are still working."""
        self._stop.set()
        self.parts.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait(self._futures, timeout=_WIND_DOWN_SECONDS)
        if self._commits is not None:
            self._commits.close()

    def _work(self) -> None:
        """Build the remaining jobs, most expensive first; the thread that finishes the last one commits the rest."""
        while numbers := self._take_jobs():
            if numbers[0] in self._small:
                self._build_small(numbers)
            else:
                self._build(numbers[0])
            with self._lock:
                self._files += len(numbers)
                self._bytes += sum([self._jobs[number].artefact.nbytes for number in numbers])
                self._unfinished -= len(numbers)
                last = not self._unfinished
            if last:
                assert self._commits is not None
                self._commits.finish()

    def _take_jobs(self) -> list[int]:
        """The next job; of small datasets several, fewer towards the end, so that all threads end at about the same time."""
        with self._lock:
            taken, size, memory = list[int](), 0, 0
            most = min(MAX_TOGETHER, max(1, len(self._left) // (2 * self._workers)))
            while self._left and len(taken) < most:
                number = self._left[0]
                size += self._jobs[number].artefact.nbytes
                memory += self._needs[number].overlapped
                if taken and (number not in self._small or size > TOGETHER_BYTES or memory > self._share.memory):
                    break
                taken.append(self._left.popleft())
                if number not in self._small:
                    break
            return taken

    def _build_small(self, numbers: Sequence[int]) -> None:
        """Build small datasets together."""
        needs, memory = [self._needs[number] for number in numbers], self._share.memory
        jobs = [job for number in numbers if isinstance(job := self._jobs[number], DatasetJob)]
        missing = [job for job in jobs if problem_with(job.artefact, self._cache, self._names) is not None]
        with self._gate.held(min(memory, sum([need.overlapped for need in needs]))):
            if self._stop.is_set():
                raise StoppedError
            assert self._commits is not None
            if missing:
                build_small(missing, self._request, self._commits, self._lengths)

    def _build(self, number: int) -> None:
        need, share = self._needs[number], self._share
        takes = share.takes(number, need)
        overlap = takes.overlapped <= share.memory
        memory = takes.overlapped if overlap else takes.memory
        wanted, room = round(share.threads * need.cost / self._total_cost), (share.memory - memory) // PIECE_BYTES + 1
        threads = 1 if number in share.divided else max(1, min(wanted, room))
        with self._gate.held(memory + (threads - 1) * PIECE_BYTES):
            if self._stop.is_set():
                raise StoppedError
            self._make(number, threads=threads, overlap=overlap)

    def _make(self, number: int, *, threads: int, overlap: bool) -> None:
        job, parts, commits = self._jobs[number], self.parts if number in self._share.divided else None, self._commits
        assert commits is not None
        if problem_with(job.artefact, self._cache, self._names) is None:
            if parts is not None:
                parts.begin(Begun(number))
            return
        if isinstance(job, BlendJob):
            build_blend(job, commits, threads=threads)
        elif parts is None:
            build_dataset(job, self._request, commits, self._lengths, threads=threads, overlap=overlap)
        else:
            begun, rows = partial(_begin, parts, number), partial(parts.await_rows, number)
            build_divided(job, self._request, commits, begun=begun, await_rows=rows)


def _begin(parts: Parts, number: int, documents: Path, samples: Path) -> None:
    parts.begin(Begun(number, documents, samples))
