"""Filling a cache with the files that Megatron's builder will look for.
Called on every rank of a launch.

    each rank  counts the tokens of its share of the prefixes      -> all ranks
    each rank  plans all of the work, checks its share of the cache's files    -> all ranks
    rank 0     locks the cache, if work is left
    each rank  builds its share, in threads; waits for the others

A complete cache is only read, so it may be read-only. An error on any rank ends all of them.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from megablend.distributed.base import Communicator
from megablend.errors import CacheError
from megablend.index.build.build import Progress
from megablend.megatron.cache_builder.artefacts import names_in, problem_with
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
    Forecast,
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
from megablend.storage.parallel_map import map_waiting
from megablend.system.atomic_write import flush_folder, remove_leftovers, translate_os_errors
from megablend.system.build_lock import build_lock, verify_shared_filesystem

T = TypeVar("T")
R = TypeVar("R")

_READERS = 8
"""Threads of a rank that open files where files have to be waited for: a network file system lets
each wait a while."""
_KEPT_BYTES = 1 << 27
"""Lengths that a rank keeps from counting to building, where its memory is not limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """What was done, or what would be done; the same on all ranks."""

    splits: tuple[SplitPlan, ...]
    missing: frozenset[str]
    """Base names of the artefacts that the cache lacked, or that the data has changed since; built
    now, except in a dry run."""
    notes: tuple[str, ...]
    """Non-fatal warnings: damaged files, changed data, a file system without locks."""
    forecast: Forecast
    """Estimated cost of what was missing."""
    seconds: float


def prepare_cache(
    request: CacheRequest,
    *,
    launch: Communicator,
    storage: Storage,
    dry_run: bool = False,
    max_memory: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> CacheReport:
    """Build what the cache lacks; nothing in a dry run.

    Args:
        request: the same on all ranks.
        storage: where the datasets' files are read.
        max_memory: bytes of arrays that the ranks of one node hold together; most of what is free
            there if None.
        progress: called on rank 0 at intervals.

    Raises: ConfigError, PlanError, DataError, CacheError if the launch is one process; of
        several ranks, one prints its error and all end with its exit code.
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
    """As `prepare_cache` does it; None if another build was at work meanwhile, so that all has
    to be looked at again."""
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
            found = _open_cache(request, jobs, missing, outdated, newest, launch, stack)
            if found is None:
                return None
            notes += found
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
                write_marker(request, splits, pairs, built=True)  # while no other build has begun
    elif launch.rank == 0 and not dry_run and newest_number(cache) == newest:
        # Else another build has begun
        write_marker(request, splits, pairs, built=False)
    return CacheReport(
        splits=splits,
        missing=outdated.union(problems),
        notes=tuple(notes),
        forecast=forecast(estimates, assignments, nodes),
        seconds=time.monotonic() - start,
    )


def _part_sizes(
    request: CacheRequest, launch: Communicator, lengths: LengthReader
) -> dict[PartKey, PartSize]:
    """Counts of all parts, on every rank; each `.idx` is read by one rank, once."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for layout in layouts(request):
        for part in layout.parts:
            own = spans.setdefault(part.prefix, [])
            if part.span not in own:
                own.append(part.span)

    sizes = _together(lambda prefix: lengths.count(prefix, spans[prefix]), list(spans), launch)
    counted = zip(spans.items(), sizes, strict=True)
    return {
        (prefix, span): size
        for (prefix, own), parts in counted
        for span, size in zip(own, parts, strict=True)
    }


def _problems(jobs: Sequence[Job], cache: Path, launch: Communicator) -> dict[str, str]:
    """What is wrong with each artefact that the cache lacks, by base name; "" if nothing is
    there."""
    names = names_in(cache)
    problems = _together(lambda job: problem_with(job.artefact, cache, names), jobs, launch)
    return {
        job.artefact.base: problem
        for job, problem in zip(jobs, problems, strict=True)
        if problem is not None
    }


def _together(look: Callable[[T], R], items: Sequence[T], launch: Communicator) -> list[R]:
    """`look` at all items; each rank at every launch.size-th. The same on every rank."""
    found: list[R | None] = [None] * len(items)
    mine = map_waiting(look, items[launch.rank :: launch.size], _READERS)
    for rank, part in enumerate(launch.allgather(mine)):
        found[rank :: launch.size] = part
    return cast("list[R]", found)


def _jobs(splits: Sequence[SplitPlan]) -> list[Job]:
    """All jobs, each artefact once: a blend may contain a prefix twice."""
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
    """Lock the cache until `stack` ends, remove leftovers of killed builds,
    check for free space; returns notes.

    None if another build was at work before this one held the lock.

    Args:
        jobs: all of the request.
        missing: those that will be built.
        outdated: base names of those of them that are there, made of other data.
        newest: on rank 0, number of the newest marker before all this was found out.

    Raises: CacheError if it cannot be written, is in use, has no room, or is another one on this
        rank.
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
    return (
        []
        if held.exclusive
        else [f"{cache}: the file system has no locks; run one build at a time"]
    )


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's search for reference cycles: a plan has none, but its many objects would
    trigger searches."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _ignore(progress: Progress) -> None:
    pass
