"""One rank's share of a build: its jobs in threads, as many at once as its memory holds, dearest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

from megablend.index.build import Progress
from megablend.index.launch import Launch
from megablend.megatron.artefacts import problem_with
from megablend.megatron.build import build_blend, build_dataset
from megablend.megatron.plan import BlendJob, Job
from megablend.megatron.request import CacheRequest
from megablend.megatron.schedule import PIECE_BYTES, MemoryGate, Need, Share

_TELL_SECONDS = 0.2


def build_share(
    jobs: Sequence[Job],
    needs: Sequence[Need],
    share: Share,
    request: CacheRequest,
    cache: Path,
    launch: Launch,
    progress: Callable[[Progress], None],
) -> None:
    """Build the jobs of `share`, and wait for the other ranks.

    Args:
        jobs: of all ranks, and their `needs`.
        progress: called on rank 0 with what all ranks have done.

    Raises: DataError, CacheError of the first job that fails; those that have begun are waited for.
    """
    gate = MemoryGate(share.memory)
    total_cost = sum(needs[i].cost for i in share.jobs)
    num_bytes = sum(job.artefact.nbytes for job in jobs)
    counters: dict[int, tuple[int, int]] = {}

    def tell() -> None:
        posts = launch.posts()
        counters.update(posts)
        if posts:
            files, size = (sum(counter[i] for counter in counters.values()) for i in (0, 1))
            progress(Progress(files=files, num_files=len(jobs), bytes=size, num_bytes=num_bytes))

    def build(number: int) -> None:
        need = needs[number]
        overlap = need.overlapped <= share.memory
        memory = need.overlapped if overlap else need.memory
        wanted, room = round(share.threads * need.cost / total_cost), (share.memory - memory) // PIECE_BYTES + 1
        threads = max(1, min(wanted, room))
        with gate.held(memory + (threads - 1) * PIECE_BYTES):
            _build(jobs[number], request, cache, threads=threads, overlap=overlap)

    done: set[Future[None]] = set()
    with ThreadPoolExecutor(share.workers) as pool:
        running = {pool.submit(build, number): number for number in share.jobs}
        try:
            while len(done) < len(running):
                done, _ = wait(running, timeout=_TELL_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                launch.post((len(done), sum(jobs[running[future]].artefact.nbytes for future in done)))
                tell()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    launch.barrier(tell)


def _build(job: Job, request: CacheRequest, cache: Path, *, threads: int, overlap: bool) -> None:
    if problem_with(job.artefact, cache) is None:
        return  # another build made it while this one waited for the lock
    if isinstance(job, BlendJob):
        build_blend(job, cache, threads=threads)
    else:
        build_dataset(job, request, cache, threads=threads, overlap=overlap)
