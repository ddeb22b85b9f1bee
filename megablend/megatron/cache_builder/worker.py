"""Build one rank's share of the jobs. Several threads build jobs at the same time, as many as fit
into the rank's memory, the most expensive jobs first.

While the threads work, all ranks exchange heartbeats a few times a second, with their progress. So
all ranks notice at the next heartbeat if a rank has failed or exited, however long their own work
would take.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from megablend.distributed.base import Communicator
from megablend.index.build.build import Progress
from megablend.megatron.cache_builder.artefacts import names_in, problem_with
from megablend.megatron.cache_builder.build_artefact import build_blend, build_dataset
from megablend.megatron.cache_builder.commit import Commits, StoppedError
from megablend.megatron.cache_builder.lengths import LengthReader
from megablend.megatron.cache_builder.schedule import Assignment, CostEstimate, MemoryGate
from megablend.megatron.cache_builder.work_plan import BlendJob, Job
from megablend.megatron.request.request import CacheRequest

_Heartbeat = tuple[bool, int, int]
"""The content of a heartbeat: whether the rank has finished, and the numbers of files and bytes
that it has built."""
_TICK_SECONDS = 0.2
"""Maximum number of seconds between two heartbeats."""
_WIND_DOWN_SECONDS = 1.0
"""Maximum time in seconds to wait before an error is reported, so that other threads of the rank
can remove their incomplete files."""


def build_share(
    jobs: Sequence[Job],
    estimates: Sequence[CostEstimate],
    assignment: Assignment,
    request: CacheRequest,
    cache: Path,
    launch: Communicator,
    lengths: LengthReader,
    progress: Callable[[Progress], None],
) -> None:
    """Build the jobs of `assignment`, and wait for the other ranks.

    Args:
        jobs, estimates: the jobs of all ranks, and the cost of each.
        progress: called on rank 0 with the progress of all ranks.

    Raises: the DataError or CacheError of the first job that fails. Jobs in progress then stop as
        soon as they write their next rows.
    """
    pool = _WorkerPool(jobs, estimates, assignment, request, cache, lengths)
    num_bytes = sum(job.artefact.nbytes for job in jobs)
    try:
        finished = False
        while not finished:
            heartbeats = launch.allgather(pool.tick())
            ranks_finished, files, sizes = zip(*heartbeats, strict=True)
            finished = all(ranks_finished)
            if launch.rank == 0:
                progress(
                    Progress(
                        files=sum(files), num_files=len(jobs), bytes=sum(sizes), num_bytes=num_bytes
                    )
                )
    finally:
        pool.end()


class _WorkerPool:
    """The threads of a rank that build its jobs."""

    def __init__(
        self,
        jobs: Sequence[Job],
        estimates: Sequence[CostEstimate],
        assignment: Assignment,
        request: CacheRequest,
        cache: Path,
        lengths: LengthReader,
    ) -> None:
        self._jobs = jobs
        self._estimates = estimates
        self._assignment = assignment
        self._request = request
        self._cache = cache
        self._lengths = lengths
        self._gate = MemoryGate(assignment.memory)
        self._total_cost = sum(estimates[number].cost for number in assignment.jobs)
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        nbytes = sum([jobs[number].artefact.nbytes for number in assignment.jobs])
        self._commits = Commits(cache, self._stop, nbytes) if assignment.jobs else None
        # Another build may have built some of the jobs while this one waited for the lock
        self._names = names_in(cache)
        self._left = deque(assignment.jobs)
        self._unfinished = len(assignment.jobs)
        self._files = 0
        self._bytes = 0
        self._finished = False
        self._workers = min(assignment.workers, len(assignment.jobs))
        self._pool = ThreadPoolExecutor(max(1, self._workers))
        self._futures = [self._pool.submit(self._work) for _ in range(self._workers)]
        for future in self._futures:
            future.add_done_callback(lambda _: self._wake.set())

    def tick(self) -> _Heartbeat:
        """Wait _TICK_SECONDS, or until a thread ends, and return the heartbeat. Raises: the error
        of a thread that failed."""
        if not self._finished:
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
        done = [future for future in self._futures if future.done()]
        for future in done:
            future.result()
        self._finished = len(done) == len(self._futures)
        return self._finished, self._files, self._bytes

    def end(self) -> None:
        """Stop the threads that are still working."""
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait(self._futures, timeout=_WIND_DOWN_SECONDS)
        if self._commits is not None:
            self._commits.close()

    def _work(self) -> None:
        """Build jobs until none is left, most expensive first. The thread that finishes the last
        job commits the last artefacts."""
        while True:
            with self._lock:
                if not self._left:
                    return
                number = self._left.popleft()
            self._build(number)
            with self._lock:
                self._files += 1
                self._bytes += self._jobs[number].artefact.nbytes
                self._unfinished -= 1
                is_last = not self._unfinished
            if is_last:
                assert self._commits is not None
                self._commits.finish()

    def _build(self, number: int) -> None:
        """Build a job as soon as enough memory is free, unless its artefact exists already. A
        blend's share of the threads is proportional to its share of the total cost."""
        job = self._jobs[number]
        estimate = self._estimates[number]
        commits = self._commits
        assert commits is not None
        with self._gate.held(estimate.memory):
            if self._stop.is_set():
                raise StoppedError
            if problem_with(job.artefact, self._cache, self._names) is None:
                return
            if isinstance(job, BlendJob):
                threads = round(self._assignment.threads * estimate.cost / self._total_cost)
                build_blend(job, commits, threads=max(1, threads))
            else:
                build_dataset(job, self._request, commits, self._lengths)
