"""Garbage collection: removes from a cache what is no longer needed.

    generations   snapshots, except the newest and those that runs use
    fragments     of files that are in no kept snapshot, or that are in a pack; fragments of parts of large files
    packs         without files of a kept snapshot
    documents     document tables (and `lengths`) of files that are in no kept snapshot
    idx           digests of `.idx` files that are in no kept snapshot
    splits        results computed from snapshots and document tables that no longer exist

Nothing is removed until it has been unused for some days: a job may have opened a snapshot while it was the newest, and a killed
build continues from its fragments. A snapshot is removed by a rename, so that it is either complete or absent; an interrupted
collection is continued by the next one, or by a build.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from megablend.errors import CacheError
from megablend.fs.atomic_write import flush_folder, list_committed, remove_leftovers, temp_sibling, translate_os_errors
from megablend.fs.build_lock import build_lock, lock_time
from megablend.fs.safe_open import check_folder
from megablend.index.cache_folders import folders, fragments, generations
from megablend.index.document_table import table_folder
from megablend.index.fragments import fragment_content, fragment_names
from megablend.index.list_snapshots import build_sequence, list_snapshots
from megablend.index.manifest import MANIFEST, ROOTS
from megablend.index.packs import Pack, Packed, packs
from megablend.index.snapshot import open_snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was removed, or would be removed."""

    generations: tuple[str, ...]
    """Digests of removed snapshots, the oldest first."""
    kept: tuple[str, ...]
    """Digests of snapshots that are kept."""
    others: int
    """Number of other removed files: fragments, packs, document tables, splits."""
    bytes: int
    """Total size of everything removed."""


def collect(
    cache: str | Path, needed: Callable[[], Collection[str]], *, min_age_seconds: float, dry_run: bool
) -> Collected:
    """Remove what is not needed and has not been used for `min_age_seconds`.

    Args:
        needed: called with the cache locked; returns digests of the snapshots to keep, in addition to the newest.
        dry_run: remove nothing.

    Raises: CacheError if there is no cache, a build is running (or that cannot be determined), or a kept snapshot is damaged; as
        `needed`.
    """
    cache = Path(cache).absolute()
    if not generations(cache).is_dir():
        raise CacheError(f"{cache}: there is no cache here: build one, or specify another directory")
    with translate_os_errors(cache), build_lock(cache, wait_seconds=0) as lock:
        if not lock.exclusive:
            raise CacheError(
                f"{cache}: the file system has no locks, so a running build cannot be detected: copy the cache to one that "
                f"has locks; or, while no build is running, remove {fragments(cache)}: the next build then reads all files again"
            )
        for folder in folders(cache):
            check_folder(folder)
        before = lock_time(cache) - min_age_seconds
        old = _old_generations(cache, set(needed()), before)
        kept = tuple(digest for digest in list_snapshots(cache) if digest not in old)
        others = [folder / name for folder in _folders(cache) for name in list_committed(folder)]
        needs = _KeptContents(cache, kept).needs
        others = [path for path in others if path.lstat().st_mtime < before and not needs(path)]
        going = [*(generations(cache) / digest for digest in old), *others]
        found = Collected(
            generations=tuple(old),
            kept=kept,
            others=len(others),
            bytes=sum(map(_size, going)),
        )
        if not dry_run:
            for path in going:
                _remove(path)
            for folder in folders(cache):
                if folder.is_dir():
                    flush_folder(folder)
                    remove_leftovers(folder)
    return found


def _folders(cache: Path) -> list[Path]:
    """The folders of files that belong to snapshots."""
    return [
        folder
        for folder in folders(cache)
        if folder.name in ("fragments", "packs", "documents", "lengths", "splits", "idx")
    ]


def _old_generations(cache: Path, needed: set[str], before: float) -> list[str]:
    """Digests of snapshots that are not needed, and were no longer the newest at the time `before`."""
    found, by_arrival = [], list_snapshots(cache)
    for place, digest in enumerate(by_arrival[:-1]):
        folder = generations(cache) / digest
        ended = min(_took_over(folder, generations(cache) / newer) for newer in by_arrival[place + 1 :])
        is_known = build_sequence(folder) >= 0  # otherwise their order is unknown: one of them may be the newest
        if is_known and digest not in needed and ended < before:
            found.append(digest)
    return found


def _took_over(folder: Path, newer: Path) -> float:
    """The latest time at which a later snapshot became the newest.

    Roots are written by every build that results in a snapshot, the manifest only when the snapshot is created. If it was created
    after the last build of the older one, that is the time, no matter how often the newer one was rebuilt since.
    """
    made = (newer / MANIFEST).stat().st_mtime
    if build_sequence(folder) >= 0 and made <= (folder / ROOTS).stat().st_mtime:
        return (newer / ROOTS).stat().st_mtime
    return made


class _KeptContents:
    """Contents of the kept snapshots, by the names that the other files of the cache are stored under."""

    def __init__(self, cache: Path, kept: Collection[str]) -> None:
        self._contents: set[tuple[str, str]] = set()
        self._files: set[str] = set()
        self._tables: set[str] = set()
        self._generations = set(kept)
        self._structures: set[str] = set()
        self._packs: set[str] = set()
        self._packed = Packed()
        for digest in kept:
            generation = open_snapshot(cache, digest)
            contents = generation.file_contents()
            self._contents.update(contents)
            self._structures.update(structure for structure, _ in contents)
            for number, source in enumerate(generation.sources):
                self._files.update(generation.file_keys(source))
                self._tables.add(table_folder(generation, number).name)
        for name in list_committed(packs(cache)):
            with contextlib.suppress(CacheError):  # a damaged pack is removed
                pack = Pack(packs(cache) / name)
                if not self._contents.isdisjoint(pack.contents()):
                    self._packs.add(name)
                    self._packed.add(pack)

    def needs(self, path: Path) -> bool:
        """Whether a kept snapshot needs the file or folder at `path`."""
        kind, name = path.parent.name, path.name
        owner = name.partition("-")[0]
        if kind == "fragments":
            single = next(iter(fragment_names([name])), None)
            if single is None or single.answer in self._packed:
                return False
            return fragment_content(path) in self._contents
        if kind == "packs":
            return name in self._packs
        if kind == "idx":
            return name in self._structures
        if kind == "lengths":
            return owner in self._files
        return owner in self._tables or (kind == "splits" and owner in self._generations)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        aside = temp_sibling(path)
        path.rename(aside)
        shutil.rmtree(aside)
    else:
        path.unlink()


def _size(path: Path) -> int:
    is_folder = path.is_dir() and not path.is_symlink()
    return sum(file.lstat().st_size for file in path.iterdir()) if is_folder else path.lstat().st_size
