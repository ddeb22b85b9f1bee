"""Building the index: rank 0 finds the files, all ranks share them, rank 0 merges what they found and commits.

    rank 0     finds the files                           -> everybody
    each rank  asks the file system for its share of their states
    rank 0     locks, plans the work                     -> everybody
    each rank  takes its share of the files and of large files' parts: a fragment that is there serves, else the file is indexed
    rank 0     merges the fragments in source and file order, commits -> the report, everybody

Nothing but the fragments, many of them in packs, and the commit outlives a build that is killed: the next one goes on from the
fragments. An error on any rank ends all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.errors import CacheError, ConfigError
from megablend.formats.megatron.reader import MEGATRON, describe_rest
from megablend.fs.atomic_write import list_committed, remove_leftovers, translate_os_errors
from megablend.fs.build_lock import build_lock, verify_shared_filesystem
from megablend.fs.safe_open import check_folder
from megablend.index.columns import ColumnsTaken
from megablend.index.complete_snapshots import complete_generations
from megablend.index.file_tasks import (
    FileTask,
    TaskPart,
    TaskResult,
    await_fragment,
    await_pack,
    ensure_fragment,
    items_of,
    join_parts,
    plan_work,
)
from megablend.index.idx_digests import LongIdx, find_missing, idx_digests, make_digests
from megablend.index.merge import write_generation
from megablend.index.pack_writer import PackWriter
from megablend.index.packs import FileFacts, Pack, Packed, facts_of, packs
from megablend.index.snapshot import Snapshot, folders, fragments, generations, list_snapshots, open_snapshot
from megablend.index.sources import SourceListing, SourcePaths, SourceSpec, find_source
from megablend.storage.base import Storage
from megablend.system.failures import translating

__all__ = ["BuildReport", "Progress", "SourceSpec", "build_index"]

_POST_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a build has come, over all ranks."""

    files: int
    num_files: int
    bytes: int
    """Sizes of the files and parts of files that are done."""
    num_bytes: int
    waiting_for: str = ""
    """The other build that holds the cache, while this one waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What a build did; the same on all ranks."""

    digest: str
    """The generation's."""
    created: bool
    """False where the same generation was there before."""
    num_files: int
    read: int
    """Files indexed now."""
    reused: int
    """Files whose fragments served."""
    changed: tuple[str, ...]
    """Files (source/name) that were indexed before in another version, and are read again."""
    added: int
    """Files that the newest generation before did not have."""
    removed: int
    """Files that the newest generation before had in these sources, and that are gone."""
    scanned_bytes: int
    """Bytes of bodies that had to be read to count."""
    seconds: float
    notes: tuple[str, ...]
    """Things worth telling that ended nothing: damaged fragments, a file system without locks, files met under several names."""
    skipped: tuple[str, ...]
    """Paths that were left out because they cannot be read (`on_unreadable: skip`): source, path and reason."""
    columns: dict[str, str | None]
    """Token column of each source; None where its format has no columns, or an older index did not record its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    nonce: str
    listings: tuple[SourceListing, ...]
    work: tuple[FileTask, ...]
    notes: tuple[str, ...]


def build_index(
    cache: str,
    sources: Sequence[SourceSpec | SourcePaths],
    *,
    launch: Communicator,
    storage: Storage,
    progress: Callable[[Progress], None] | None = None,
) -> BuildReport:
    """Index all files of the sources and commit a generation to the cache. Called by all ranks of the launch.

    Args:
        cache: directory, made where it is not there; on a file system that all ranks share.
        sources: with names of their own; the same on all ranks. SourcePaths are indexed as they are.
        storage: where their files are found and read.
        progress: called on rank 0 now and then.

    Raises: ConfigError, DataError, CacheError where the launch is one process; of several ranks, one prints its error
        and all end with its exit code.
    """
    try:
        with translating(cache):
            return _build(Path(cache).absolute(), sources, launch, storage, progress or _ignore)
    except BaseException as error:
        launch.abort(error)


def _build(
    cache: Path,
    sources: Sequence[SourceSpec | SourcePaths],
    launch: Communicator,
    storage: Storage,
    progress: Callable[[Progress], None],
) -> BuildReport:
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        listings, notes = _list_files(sources, launch, storage)
        packed = Packed()
        waiting = report_waiting(progress)
        prepared = launch.bcast(_prepare(cache, listings, notes, packed, stack, waiting) if launch.rank == 0 else None)
        assert prepared is not None
        if launch.rank > 0:
            verify_shared_filesystem(cache, prepared.nonce)
        items = items_of(prepared.work)
        done, written = _index_share(prepared, items, cache, launch, storage, progress)
        gathered = launch.gather((done, written))
        report, long_idx = None, tuple[LongIdx, ...]()
        if launch.rank == 0:
            results = {number: result for rank, _ in gathered for number, result in rank.items()}
            for name in chain(*(names for _, names in gathered)):
                packed.add(await_pack(packs(cache) / name))
            report = _commit(cache, prepared, items, results, packed, start)
            long_idx = tuple(find_missing(open_snapshot(cache, report.digest)))
        for each in launch.bcast(long_idx)[launch.rank :: launch.size]:
            make_digests(cache, each, storage)
        launch.barrier()
        report = launch.bcast(report)
        assert report is not None
        return report


def _list_files(
    sources: Sequence[SourceSpec | SourcePaths], launch: Communicator, storage: Storage
) -> tuple[tuple[SourceListing, ...], tuple[str, ...]]:
    """The sources with their files, on rank 0, and notes; the ranks share the stats, each of which may be slow on a network."""
    name, count = Counter(_spec_of(each).name for each in sources).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"{count} sources have the name {name!r}: each needs one of its own")
    found = launch.bcast(tuple(_find(each, storage) for each in sources) if launch.rank == 0 else ())
    mine = [[each.stat(path, storage) for path in each.paths[launch.rank :: launch.size]] for each in found]
    ranks = launch.gather(mine)
    notes = tuple(each.note for each in found if each.note is not None and each.spec.extra_of is None)
    if not ranks:
        return (), notes
    return tuple(each.listing(chain(*shares)) for each, *shares in zip(found, *ranks, strict=True)), notes


def _spec_of(source: SourceSpec | SourcePaths) -> SourceSpec:
    return source.spec if isinstance(source, SourcePaths) else source


def _find(source: SourceSpec | SourcePaths, storage: Storage) -> SourcePaths:
    return source if isinstance(source, SourcePaths) else find_source(source, storage)


def report_waiting(progress: Callable[[Progress], None] | None) -> Callable[[str], None] | None:
    """What tells `progress` for whom a build waits."""
    if progress is None:
        return None
    return lambda holder: progress(Progress(files=0, num_files=0, bytes=0, num_bytes=0, waiting_for=holder))


def _prepare(
    cache: Path,
    listings: tuple[SourceListing, ...],
    notes: tuple[str, ...],
    packed: Packed,
    stack: contextlib.ExitStack,
    on_wait: Callable[[str], None] | None,
) -> _Prepared:
    """Lock the cache (until `stack` ends), clean it of what killed builds left, and find the work; fills `packed`."""
    with translate_os_errors(cache):
        for folder in (fragments(cache), packs(cache), generations(cache), idx_digests(cache)):
            folder.mkdir(parents=True, exist_ok=True)
        for folder in folders(cache):
            check_folder(folder)
        held = stack.enter_context(build_lock(cache, on_wait=on_wait))
        for folder in (*folders(cache), *generations(cache).iterdir()):
            if folder.is_dir():
                remove_leftovers(folder)
    if not held.exclusive:
        notes = (f"{cache}: the file system has no locks; run one build at a time", *notes)
    damaged = (_open_pack(packed, packs(cache) / name) for name in list_committed(packs(cache)))
    notes = (*notes, *filter(None, damaged))
    work = plan_work(listings, fragments(cache), packed)
    return _Prepared(nonce=held.nonce, listings=listings, work=tuple(work), notes=notes)


def _open_pack(packed: Packed, path: Path) -> str | None:
    """Count a pack in; one that is damaged is removed, since its files are read again: what was wrong with it."""
    try:
        packed.add(Pack(path))
    except CacheError as error:
        if error.__cause__ is None:  # damaged, not merely unreadable just now
            path.unlink(missing_ok=True)
        return str(error)
    return None


def _index_share(
    prepared: _Prepared,
    items: Sequence[TaskPart],
    cache: Path,
    launch: Communicator,
    storage: Storage,
    progress: Callable[[Progress], None],
) -> tuple[dict[int, TaskResult], list[str]]:
    """Do this rank's share of the work, and wait for the others.

    Returns: what became of each item, by its number; names of the packs that this rank wrote.
    """
    work, folder = prepared.work, fragments(cache)
    tally = _Tally(work, items)

    def tell() -> None:
        if posts := launch.posts():
            tally.add(number for _, numbers in posts for number in numbers)
            progress(tally.progress())

    done: dict[int, TaskResult] = {}
    untold: list[int] = []
    posted = time.monotonic()
    mine = assign_longest_first([item.cost for item in items], launch.size)[launch.rank]
    writer = PackWriter(packs(cache), folder)
    try:
        for number in mine:
            item = items[number]
            file = work[item.number]
            done[number] = ensure_fragment(file, item.part, prepared.listings[file.source], folder, writer, storage)
            untold.append(number)
            if len(done) == len(mine) or time.monotonic() > posted + _POST_SECONDS:
                launch.post(untold)
                untold, posted = [], time.monotonic()
                tell()
    except BaseException:
        with contextlib.suppress(CacheError):  # what was found until then serves the next build
            writer.flush()
        raise
    writer.flush()
    launch.barrier(tell)
    divided = [file for file in work if file.num_parts > 1]
    for file in divided[launch.rank :: launch.size]:
        join_parts(file, folder)
    return done, writer.written


class _Tally:
    """What of the work is done, over all ranks."""

    def __init__(self, work: Sequence[FileTask], items: Sequence[TaskPart]) -> None:
        self._items = items
        self._left = [file.num_parts for file in work]
        self._files = sum(file.packed for file in work)
        self._bytes = sum(file.file.size for file in work if file.packed)
        self._num_bytes = sum(file.file.size for file in work)

    def add(self, numbers: Iterable[int]) -> None:
        """Count items that are done, each once."""
        for number in numbers:
            file = self._items[number].number
            self._left[file] -= 1
            self._files += self._left[file] == 0
            self._bytes += self._items[number].size

    def progress(self) -> Progress:
        """How far the build has come."""
        return Progress(files=self._files, num_files=len(self._left), bytes=self._bytes, num_bytes=self._num_bytes)


def _commit(
    cache: Path,
    prepared: _Prepared,
    items: Sequence[TaskPart],
    results: dict[int, TaskResult],
    packed: Packed,
    start: float,
) -> BuildReport:
    newest = _newest(cache)
    columns, rests = ColumnsTaken(), list[str]()

    def load(work: FileTask) -> FileFacts:
        name = work.fragment
        facts = (
            packed.facts(name.answer)
            if name.answer in packed
            else facts_of(await_fragment(fragments(cache) / str(name)))
        )
        columns.add(prepared.listings[work.source], work.file, facts.column)
        if prepared.listings[work.source].format == MEGATRON.name and (
            rest := describe_rest(work.file.path, facts.blocks, work.file.size)
        ):
            rests.append(rest)
        return facts

    digest, created = write_generation(cache, prepared.listings, map(load, prepared.work), columns.by_source)
    notes = (*prepared.notes, *complete_generations(cache, digest))
    here = {(listing.spec.name, file.name) for listing in prepared.listings for file in listing.files}
    sources = {listing.spec.name for listing in prepared.listings}
    before = {(source, name) for source, name in _files(newest) if source in sources}
    read = {items[number].number for number, result in results.items() if result.read}
    return BuildReport(
        digest=digest,
        created=created,
        num_files=len(prepared.work),
        read=len(read),
        reused=len(prepared.work) - len(read),
        changed=tuple(
            f"{prepared.listings[item.source].spec.name}/{item.file.name}" for item in prepared.work if item.changed
        ),
        added=len(here - before),
        removed=len(before - here),
        scanned_bytes=sum(result.scanned_bytes for result in results.values()),
        seconds=time.monotonic() - start,
        notes=notes + tuple(rests) + tuple(note for _, result in sorted(results.items()) if (note := result.note)),
        skipped=tuple(
            f"source {listing.spec.name!r}: {path}"
            for listing in prepared.listings
            if listing.spec.extra_of is None
            for path in listing.skipped
        ),
        columns={
            listing.spec.name: columns.by_source.get(listing.spec.name)
            for listing in prepared.listings
            if listing.spec.extra_of is None
        },
    )


def _newest(cache: Path) -> Snapshot | None:
    """The newest generation that can be opened."""
    for digest in reversed(list_snapshots(cache)):
        with contextlib.suppress(CacheError):
            return open_snapshot(cache, digest)
    return None


def _files(generation: Snapshot | None) -> list[tuple[str, str]]:
    """(source name, file name) of all files."""
    if generation is None:
        return []
    names = generation.file_names()
    return [(source.name, names[i]) for source in generation.sources for i in source.files]


def _ignore(progress: Progress) -> None:
    pass
