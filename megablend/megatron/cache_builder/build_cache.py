"""Fill a cache with the files that Megatron's builder will look for. All ranks of a launch share
the work.

    each rank  counts the tokens of its share of the prefixes      -> all ranks
    each rank  plans all of the work, checks its share of the cache's files    -> all ranks
    rank 0     locks the cache, if work is left
    each rank  builds its share, in threads; waits for the others

A complete cache is only read, so it may be read-only. An error on any rank stops all of them.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

from megablend.distributed.base import Communicator
from megablend.errors import CacheError
from megablend.index.build.build import Progress
from megablend.megatron.cache_builder.artefacts import names_in, problem_with
from megablend.megatron.cache_builder.cache_report import CacheReport
from megablend.megatron.cache_builder.commit import WORK_FOLDER
from megablend.megatron.cache_builder.completion_marker import (
    Pairs,
    begin_build,
    find_outdated,
    newest_number,
    write_marker,
)
from megablend.megatron.cache_builder.lengths import LengthReader, PartSize
from megablend.megatron.cache_builder.schedule import (
    assign_jobs,
    estimate_cost,
    forecast,
    node_resources,
)
from megablend.megatron.cache_builder.work_plan import (
    Job,
    PartKey,
    SplitPlan,
    plan_cache,
    refuse_oversampling,
)
from megablend.megatron.cache_builder.worker import build_share
from megablend.megatron.pair_files import look_at_pairs
from megablend.megatron.request.layout import layouts
from megablend.megatron.request.request import CacheRequest
from megablend.storage.base import Storage
from megablend.storage.parallel_map import parallel_map
from megablend.system.atomic_write import flush_folder, remove_leftovers, translate_os_errors
from megablend.system.build_lock import build_lock, verify_shared_filesystem

T = TypeVar("T")
R = TypeVar("R")

_READERS = 8
"""Number of threads of a rank that open files. Opening a file takes long on a network file
system."""
_KEPT_BYTES = 1 << 27
"""Number of bytes of lengths that a rank keeps in memory between counting and building, if the
memory is not limited."""


def prepare_cache(
    request: CacheRequest,
    *,
    launch: Communicator,
    storage: Storage,
    dry_run: bool = False,
    max_memory: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> CacheReport:
    """Build the missing files of a cache. All ranks of the launch must call this function.

    Args:
        request: the files to build; the same on all ranks.
        storage: reads the files of the datasets.
        dry_run: whether to only report what would be built.
        max_memory: limit in bytes for the arrays of all ranks of a node together; None for most of
            the node's free memory.
        progress: called on rank 0 at intervals.

    Raises: ConfigError, PlanError, DataError, CacheError if there is only one process. With several
        ranks, the rank that fails prints its error, and all ranks exit with its exit code.
    """
    try:
        with _without_collection():
            report = None
            while report is None:
                report = _prepare(
                    request, launch, storage, dry_run, max_memory, progress or _ignore
                )
            return report
    except BaseException as error:
        launch.abort(error)


def _prepare(
    request: CacheRequest,
    launch: Communicator,
    storage: Storage,
    dry_run: bool,
    max_memory: int | None,
    progress: Callable[[Progress], None],
) -> CacheReport | None:
    """Do the work of `prepare_cache` once. Returns None if another build has changed the cache in
    the meantime, so that it must be checked again."""
    start = time.monotonic()
    cache = Path(request.path_to_cache).absolute()
    lengths = LengthReader(request, storage, keep_bytes=_KEPT_BYTES if max_memory is None else 0)
    newest = 0
    pairs = Pairs()
    if launch.rank == 0:
        prefixes = {part.prefix for layout in layouts(request) for part in layout.parts}
        newest = newest_number(cache)
        pairs = look_at_pairs(prefixes)
    splits = tuple(plan_cache(request, _part_sizes(request, launch, lengths)))
    if launch.rank == 0:
        for split in splits:
            refuse_oversampling(split, surplus=request.mid_level_dataset_surplus)
    jobs = _jobs(splits)
    problems = _problems(jobs, cache, launch)
    outdated = launch.bcast(
        find_outdated(jobs, cache) - problems.keys() if launch.rank == 0 else None
    )
    assert outdated is not None
    missing = [
        job for job in jobs if job.artefact.base in outdated or job.artefact.base in problems
    ]
    estimates = [estimate_cost(job) for job in missing]
    nodes = launch.allgather(node_resources(max_memory))
    assignments = assign_jobs(estimates, [job.name for job in missing], nodes)
    notes = [problem for problem in problems.values() if problem]
    if outdated:
        notes.append(
            f"{cache}: {len(outdated)} of its {len(jobs)} indices were built from other data or "
            "settings, and count as missing"
        )
    if missing and not dry_run:
        with contextlib.ExitStack() as stack:
            lock_notes = _open_cache(request, jobs, missing, outdated, newest, launch, stack)
            if lock_notes is None:
                return None
            notes += lock_notes
            build_share(
                missing,
                estimates,
                assignments[launch.rank],
                request,
                cache,
                launch,
                lengths,
                progress,
            )
            if launch.rank == 0:
                flush_folder(cache)
                # The lock is held, so no other build has begun
                write_marker(request, splits, pairs, built=True)
    elif launch.rank == 0 and not dry_run:
        other_has_begun = newest_number(cache) != newest
        if not other_has_begun:
            write_marker(request, splits, pairs, built=False)
    return CacheReport(
        cache=request.path_to_cache,
        dry_run=dry_run,
        splits=splits,
        missing=outdated.union(problems),
        notes=tuple(notes),
        forecast=forecast(estimates, assignments, nodes),
        seconds=time.monotonic() - start,
    )


def _part_sizes(
    request: CacheRequest, launch: Communicator, lengths: LengthReader
) -> dict[PartKey, PartSize]:
    """Return the sizes of all parts of datasets, on every rank. Each `.idx` is read once, by one of
    the ranks."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for layout in layouts(request):
        for part in layout.parts:
            spans_of_prefix = spans.setdefault(part.prefix, [])
            if part.span not in spans_of_prefix:
                spans_of_prefix.append(part.span)

    sizes = _map_shared(lambda prefix: lengths.count(prefix, spans[prefix]), list(spans), launch)
    return {
        (prefix, span): size
        for (prefix, spans_of_prefix), sizes_of_prefix in zip(spans.items(), sizes, strict=True)
        for span, size in zip(spans_of_prefix, sizes_of_prefix, strict=True)
    }


def _problems(jobs: Sequence[Job], cache: Path, launch: Communicator) -> dict[str, str]:
    """Return the problem of each artefact that is missing or unusable in the cache, by base name.
    The problem is "" if the artefact has no description."""
    names = names_in(cache)
    problems = _map_shared(lambda job: problem_with(job.artefact, cache, names), jobs, launch)
    return {
        job.artefact.base: problem
        for job, problem in zip(jobs, problems, strict=True)
        if problem is not None
    }


def _map_shared(function: Callable[[T], R], items: Sequence[T], launch: Communicator) -> list[R]:
    """Call a function for all items, divided among the ranks. Returns the results for all items on
    every rank."""
    results: list[R | None] = [None] * len(items)
    own_results = parallel_map(function, items[launch.rank :: launch.size], _READERS)
    for rank, of_rank in enumerate(launch.allgather(own_results)):
        results[rank :: launch.size] = of_rank
    return cast("list[R]", results)


def _jobs(splits: Sequence[SplitPlan]) -> list[Job]:
    """Return the jobs of all splits. Each artefact is included only once, although a blend may
    contain a prefix twice."""
    jobs = [job for split in splits for job in split.jobs]
    return list({job.artefact.base: job for job in jobs}.values())


def _open_cache(
    request: CacheRequest,
    jobs: Sequence[Job],
    missing: Sequence[Job],
    outdated: Collection[str],
    newest: int,
    launch: Communicator,
    stack: contextlib.ExitStack,
) -> list[str] | None:
    """Lock the cache until `stack` closes, remove leftovers of killed builds, and check that there
    is enough free space.

    Args:
        jobs: all jobs of the request.
        missing: the jobs that will be built.
        outdated: base names of existing artefacts that were made from other data or settings.
        newest: number of the newest marker before the cache was examined; only used on rank 0.
    Returns: notes for the report; None if another build has changed the cache since it was
        examined.
    Raises: CacheError if the cache cannot be written, is in use, lacks free space, or is not the
        same folder as on rank 0.
    """
    cache = Path(request.path_to_cache).absolute()
    work = cache / WORK_FOLDER
    held = None
    is_current = True
    if launch.rank == 0:
        with translate_os_errors(cache):
            work.mkdir(parents=True, exist_ok=True)
            held = stack.enter_context(build_lock(work))
            remove_leftovers(work)
            free = shutil.disk_usage(cache).free
        is_current = newest_number(cache) == newest
    if not launch.bcast(is_current):
        return None
    if launch.rank == 0:
        nbytes = sum(job.artefact.nbytes for job in missing)
        if free < nbytes:
            raise CacheError(
                f"{cache}: {free:,} bytes are free, but the files need {nbytes:,}; free disk space or choose another folder"
            )
        begin_build(request, jobs, {job.artefact.base for job in missing}, outdated, cache)
    held = launch.bcast(held)
    assert held is not None
    if launch.rank > 0:
        verify_shared_filesystem(work, held.nonce)
    if held.exclusive:
        return []
    return [f"{cache}: the file system does not support locks; run only one build at a time"]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Disable Python's garbage collector. It would run often because of the many objects of a plan,
    although they contain no reference cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _ignore(progress: Progress) -> None:
    pass
