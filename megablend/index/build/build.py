"""Build the index: rank 0 finds the files, each rank indexes a share of the files, and rank 0
merges and commits the results.

    rank 0     finds the files                           -> all ranks
    each rank  stats its share of the files
    rank 0     locks the cache                           -> all ranks, which stat again if it waited for another build
    rank 0     plans the work                            -> all ranks
    each rank  processes its share of files and parts of large files: reuses the fragment if there is one, else indexes the file
    rank 0     merges the fragments in source and file order, commits -> report to all ranks

A build that is killed leaves only fragments (many of them in packs) or a complete snapshot. The
next build continues from the fragments. An error on any rank terminates all ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from megablend.caches.base import CacheStore
from megablend.caches.find import CacheLike, find_store
from megablend.distributed.base import Communicator
from megablend.errors import CacheError, ConfigError
from megablend.index.build.build_report import BuildReport, Progress, report_waiting
from megablend.index.build.commit_build import commit_build
from megablend.index.build.file_tasks import (
    FileTask,
    await_pack,
    describe_contradictions,
    items_of,
    plan_work,
)
from megablend.index.build.packs import Pack, Packed
from megablend.index.build.share_work import index_share
from megablend.index.build.source_spec import SourceSpec, list_columns
from megablend.index.build.sources import find_source
from megablend.index.read.idx_digests import LongIdx, find_missing, make_digests
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.cache_folders import fragments, idx_digests, packs, snapshots
from megablend.storage.base import Storage
from megablend.storage.parallel_map import parallel_map
from megablend.system.atomic_write import translate_os_errors
from megablend.system.build_lock import LockInfo
from megablend.system.failures import translating

__all__ = ["BuildReport", "Progress", "SourceSpec", "build_index"]


class Prepared(NamedTuple):
    """The message that rank 0 sends to start the work of all ranks."""

    columns: Sequence[SourceSpec]
    """The columns to index."""
    work: Sequence[FileTask]
    """The tasks for all files of the columns."""
    notes: tuple[str, ...]
    """Warnings so far."""


def build_index(
    cache: CacheLike,
    sources: Sequence[SourceSpec],
    *,
    launch: Communicator,
    storage: Storage,
    progress: Callable[[Progress], None] | None = None,
) -> BuildReport:
    """Index all files of the sources and commit a snapshot to the cache. All ranks must call this
    function.

    Args:
        cache: the cache's store, or a directory on a file system that all ranks share; created if
            missing.
        sources: the sources, with unique names; the same on all ranks. If the `paths` of a source
            are given, its patterns are not searched.
        storage: finds and reads the files.
        progress: called on rank 0 at intervals.

    Raises: ConfigError, DataError, CacheError if there is only one process. With several ranks, one
        rank prints its error, and all exit with the exit code of that error.
    """
    try:
        with translating(str(cache)):
            return _build(find_store(cache), sources, launch, storage, progress or _ignore)
    except BaseException as error:
        launch.abort(error)


def _build(
    store: CacheStore,
    sources: Sequence[SourceSpec],
    launch: Communicator,
    storage: Storage,
    progress: Callable[[Progress], None],
) -> BuildReport:
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        listings, notes = _list_files(sources, launch, storage)
        packed = Packed()
        held = launch.bcast(_lock(store, stack, progress) if launch.rank == 0 else None)
        assert held is not None
        if held.waited:  # the index of the other build may have newer files
            listings, notes = _list_files(sources, launch, storage)
        columns: Sequence[SourceSpec] = list_columns(listings)
        prepared = launch.bcast(
            _prepare(store, columns, notes, packed, held) if launch.rank == 0 else None
        )
        assert prepared is not None
        columns, work, notes = prepared
        if launch.rank > 0:
            store.verify_shared(held.nonce)
            _make_folders(store)
        items = items_of(work)
        results_here, packs_here = index_share(work, items, store, launch, storage, progress)
        gathered = launch.gather((results_here, packs_here))
        report = None
        long_idx = list[LongIdx]()
        if launch.rank == 0:
            results = {
                number: result
                for results_of_rank, _ in gathered
                for number, result in results_of_rank.items()
            }
            for name in chain(*(packs for _, packs in gathered)):
                packed.add(await_pack(store, name))
            notes = (*notes, *describe_contradictions(work, storage))
            report = commit_build(store, columns, work, items, results, packed, notes, start=start)
            if any(column.kind.has_group_digests for column in columns):
                long_idx = list(find_missing(open_snapshot(store, report.digest)))
        for idx in launch.bcast(long_idx)[launch.rank :: launch.size]:
            make_digests(store, idx, storage)
        launch.barrier()
        report = launch.bcast(report)
        assert report is not None
        return report


def _list_files(
    sources: Sequence[SourceSpec], launch: Communicator, storage: Storage
) -> tuple[tuple[SourceSpec, ...], tuple[str, ...]]:
    """Find the files of the sources on rank 0, and stat a share of them on each rank, since a stat
    may be slow on a network. Rank 0 returns the sources with their files, and warnings."""
    name, count = Counter(source.name for source in sources).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"{count} sources are named {name!r}: source names must be unique")
    located = launch.bcast(_find_all(sources, storage) if launch.rank == 0 else ())
    _share_known_files(launch, storage)
    share = slice(launch.rank, None, launch.size)
    files_here = [source.stat_files(source.paths[share], storage) for source in located]
    files_by_rank = launch.gather(files_here)
    _share_known_files(launch, storage)
    notes = tuple(source.note for source in located if source.note is not None)
    if not files_by_rank:
        return (), notes
    listed = tuple(
        source.with_files(chain(*shares))
        for source, *shares in zip(located, *files_by_rank, strict=True)
    )
    return listed, notes


def _share_known_files(launch: Communicator, storage: Storage) -> None:
    """Send the file versions that each rank has requested to all other ranks, so that they do not
    request them again."""
    if launch.size > 1:
        for known in launch.allgather(storage.known_files()):
            storage.add_known_files(known)


def _find_all(sources: Sequence[SourceSpec], storage: Storage) -> tuple[SourceSpec, ...]:
    """Find the files of the sources whose `paths` are not given."""
    patterns = [source.patterns[0] for source in sources if not source.paths]
    threads = max((storage.limits(pattern).max_files for pattern in patterns), default=1)

    def find(source: SourceSpec) -> SourceSpec:
        return source if source.paths else find_source(source, storage)

    return tuple(parallel_map(find, sources, threads))


def _lock(
    store: CacheStore, stack: contextlib.ExitStack, progress: Callable[[Progress], None]
) -> LockInfo:
    """Lock the cache until `stack` closes, and remove leftovers of killed builds."""
    _make_folders(store)
    with translate_os_errors(store.folder):
        held = stack.enter_context(store.hold(on_wait=report_waiting(progress)))
        store.remove_leftovers()
    return held


def _prepare(
    store: CacheStore,
    columns: Sequence[SourceSpec],
    notes: tuple[str, ...],
    packed: Packed,
    held: LockInfo,
) -> Prepared:
    """Add all packs of the locked cache to `packed`, and plan the work."""
    if not held.exclusive:
        notes = (
            f"{store.location}: the file system has no locks; do not run two builds at once",
            *notes,
        )
    problems = (_open_pack(packed, store, name) for name in store.list_files("packs"))
    notes = (*notes, *filter(None, problems))
    work = plan_work(columns, store.list_files("fragments"), packed)
    return Prepared(columns, work, notes)


def _make_folders(store: CacheStore) -> None:
    """Create the folders that indexing writes to."""
    cache = store.folder
    with translate_os_errors(cache):
        for folder in (fragments(cache), packs(cache), snapshots(cache), idx_digests(cache)):
            folder.mkdir(parents=True, exist_ok=True)


def _open_pack(packed: Packed, store: CacheStore, name: str) -> str | None:
    """Add a pack to `packed`; if it is damaged, remove it, so that its files will be indexed again.
    Return what is wrong with the pack, or None."""
    try:
        packed.add(Pack(store.fetch_file("packs", name)))
    except CacheError as error:
        # An error with a cause may be temporary; without one, the pack is damaged
        if error.__cause__ is None:
            store.remove("packs", name)
        return str(error)
    return None


def _ignore(progress: Progress) -> None:
    pass
