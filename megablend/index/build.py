"""Building the index: rank 0 finds the files, all ranks share them, rank 0 merges what they found and commits.

    rank 0     finds the files                           -> everybody
    each rank  asks the file system for its share of their states
    rank 0     locks, plans the work                     -> everybody
    each rank  takes its share of the files and of large files' parts: a fragment that is there serves, else the file is indexed
    rank 0     merges the fragments in source and file order, commits -> the report, everybody

Nothing but the fragments and the commit outlives a build that is killed: the next one goes on from the fragments. An
error on any rank ends all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megablend.errors import CacheError, ConfigError
from megablend.index.cache import Generation, folders, fragments, generations, list_generations, open_generation
from megablend.index.disk import remove_leftovers, writing
from megablend.index.fragments import Fragment
from megablend.index.launch import Launch
from megablend.index.lock import build_lock, check_shared
from megablend.index.merge import write_generation
from megablend.index.share import share
from megablend.index.sources import SourceFile, SourceListing, SourceSpec, find_source
from megablend.index.work import Done, Item, Work, await_fragment, ensure_fragment, items_of, join_parts, plan_work

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
    """Things worth telling that ended nothing: damaged fragments, a file system without locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    nonce: str
    listings: tuple[SourceListing, ...]
    work: tuple[Work, ...]
    notes: tuple[str, ...]


def build_index(
    cache: str,
    sources: Sequence[SourceSpec],
    *,
    launch: Launch,
    progress: Callable[[Progress], None] | None = None,
) -> BuildReport:
    """Index all files of the sources and commit a generation to the cache. Called by all ranks of the launch.

    Args:
        cache: directory, made where it is not there; on a file system that all ranks share.
        sources: with names of their own; the same on all ranks.
        progress: called on rank 0 now and then.

    Raises: ConfigError, DataError, CacheError where the launch is one process; of several ranks, one prints its error
        and all end with its exit code.
    """
    try:
        return _build(Path(cache).absolute(), sources, launch, progress or _ignore)
    except BaseException as error:
        launch.abort(error)


def _build(
    cache: Path, sources: Sequence[SourceSpec], launch: Launch, progress: Callable[[Progress], None]
) -> BuildReport:
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        listings = _list_files(sources, launch)
        prepared = launch.bcast(_prepare(cache, listings, stack, progress) if launch.rank == 0 else None)
        assert prepared is not None
        if launch.rank > 0:
            check_shared(cache, prepared.nonce)
        items = items_of(prepared.work)
        done = _index_share(prepared, items, fragments(cache), launch, progress)
        gathered = launch.gather(done)
        report = None
        if launch.rank == 0:
            results = {number: result for rank in gathered for number, result in rank.items()}
            report = _commit(cache, prepared, items, results, start)
        report = launch.bcast(report)
        assert report is not None
        return report


def _list_files(sources: Sequence[SourceSpec], launch: Launch) -> tuple[SourceListing, ...]:
    """The sources with their files, on rank 0; the ranks share the stats, each of which may take a while on a network."""
    name, count = Counter(spec.name for spec in sources).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"{count} sources have the name {name!r}: each needs one of its own")
    found = launch.bcast(tuple(map(find_source, sources)) if launch.rank == 0 else ())
    mine = [[each.stat(path) for path in each.paths[launch.rank :: launch.size]] for each in found]
    ranks = launch.gather(mine)
    return tuple(each.listing(chain(*shares)) for each, *shares in zip(found, *ranks, strict=True)) if ranks else ()


def report_waiting(progress: Callable[[Progress], None] | None) -> Callable[[str], None] | None:
    """What tells `progress` for whom a build waits."""
    if progress is None:
        return None
    return lambda holder: progress(Progress(files=0, num_files=0, bytes=0, num_bytes=0, waiting_for=holder))


def _prepare(
    cache: Path,
    listings: tuple[SourceListing, ...],
    stack: contextlib.ExitStack,
    progress: Callable[[Progress], None],
) -> _Prepared:
    """Lock the cache (until `stack` ends), clean it of what killed builds left, and find the work."""
    with writing(cache):
        for folder in (fragments(cache), generations(cache)):
            folder.mkdir(parents=True, exist_ok=True)
        held = stack.enter_context(build_lock(cache, on_wait=report_waiting(progress)))
        for folder in (*folders(cache), *generations(cache).iterdir()):
            if folder.is_dir():
                remove_leftovers(folder)
    notes = () if held.exclusive else (f"{cache}: the file system has no locks; run one build at a time",)
    work = plan_work(listings, fragments(cache))
    return _Prepared(nonce=held.nonce, listings=listings, work=tuple(work), notes=notes)


def _index_share(
    prepared: _Prepared, items: Sequence[Item], folder: Path, launch: Launch, progress: Callable[[Progress], None]
) -> dict[int, Done]:
    """Do this rank's share of the work, and wait for the others; what became of each item, by its number."""
    work = prepared.work
    tally = _Tally(work, items)

    def tell() -> None:
        if posts := launch.posts():
            tally.add(number for _, numbers in posts for number in numbers)
            progress(tally.progress())

    done: dict[int, Done] = {}
    untold: list[int] = []
    posted = time.monotonic()
    mine = share([item.cost for item in items], launch.size)[launch.rank]
    for number in mine:
        item = items[number]
        file = work[item.number]
        done[number] = ensure_fragment(file, item.part, prepared.listings[file.source], folder)
        untold.append(number)
        if len(done) == len(mine) or time.monotonic() > posted + _POST_SECONDS:
            launch.post(untold)
            untold, posted = [], time.monotonic()
        tell()
    launch.barrier(tell)
    divided = [file for file in work if file.num_parts > 1]
    for file in divided[launch.rank :: launch.size]:
        join_parts(file, folder)
    return done


class _Tally:
    """What of the work is done, over all ranks."""

    def __init__(self, work: Sequence[Work], items: Sequence[Item]) -> None:
        self._items = items
        self._left = [file.num_parts for file in work]
        self._files = self._bytes = 0
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
    cache: Path, prepared: _Prepared, items: Sequence[Item], results: dict[int, Done], start: float
) -> BuildReport:
    newest = _newest(cache)
    by_file = {(item.source, item.file.name): item.fragment for item in prepared.work}

    def load(source: int, file: SourceFile) -> Fragment:
        return await_fragment(fragments(cache) / str(by_file[source, file.name]))

    digest, created = write_generation(cache, prepared.listings, load)
    here = {(listing.spec.name, file.name) for listing in prepared.listings for file in listing.files}
    names = {listing.spec.name for listing in prepared.listings}
    before = {(source, name) for source, name in _files(newest) if source in names}
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
        notes=prepared.notes + tuple(note for _, result in sorted(results.items()) if (note := result.note)),
    )


def _newest(cache: Path) -> Generation | None:
    """The newest generation that can be opened."""
    for digest in reversed(list_generations(cache)):
        with contextlib.suppress(CacheError):
            return open_generation(cache, digest)
    return None


def _files(generation: Generation | None) -> list[tuple[str, str]]:
    """(source name, file name) of all files."""
    if generation is None:
        return []
    names = generation.file_names()
    return [(source.name, names[i]) for source in generation.sources for i in source.files]


def _ignore(progress: Progress) -> None:
    pass
