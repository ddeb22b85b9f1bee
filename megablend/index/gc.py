"""Removing from a cache what nothing needs any more.

    generations   all but the newest and those that runs stand on
    fragments     of files that no generation holds which stays, or that a pack has; the parts of large files
    packs         of which no file is in a generation that stays
    documents     and their lengths, where no generation that stays holds the files
    idx           digests of `.idx` files that no generation holds which stays
    splits        what was computed of generations and documents that are gone

None goes before it was out of use for some days: a job may have opened a generation while it was the newest, and a build that was
killed goes on from its fragments. A generation vanishes by a rename, so that it is there as a whole or not at all; a collection
that is killed is gone on with by the next one, or by a build.
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
    """What went, or would go."""

    generations: tuple[str, ...]
    """Digests, the oldest first."""
    kept: tuple[str, ...]
    """Digests of those that stay."""
    others: int
    """Fragments, tables of documents, splits."""
    bytes: int
    """Of all that went."""


def collect(
    cache: str | Path, needed: Callable[[], Collection[str]], *, min_age_seconds: float, dry_run: bool
) -> Collected:
    """Remove what nothing needs, and nothing has needed for `min_age_seconds`.

    Args:
        needed: called with the cache locked: digests of the generations that have to stay, besides the newest.
        dry_run: remove nothing.

    Raises: CacheError where there is no cache, a build runs, or may run for all that is known, or a generation that stays is
        damaged; as `needed`.
    """
    cache = Path(cache).absolute()
    if not generations(cache).is_dir():
        raise CacheError(f"{cache}: there is no cache here: build one, or name another directory")
    with translate_os_errors(cache), build_lock(cache, wait_seconds=0) as held:
        if not held.exclusive:
            raise CacheError(
                f"{cache}: the file system has no locks, so that nothing tells whether a build runs: copy the cache to one that "
                f"has, or, while no build runs, remove {fragments(cache)} by hand: the next build reads all files again"
            )
        for folder in folders(cache):
            check_folder(folder)
        before = lock_time(cache) - min_age_seconds
        old = _old_generations(cache, set(needed()), before)
        kept = tuple(digest for digest in list_snapshots(cache) if digest not in old)
        others = [folder / name for folder in _folders(cache) for name in list_committed(folder)]
        needs = _Held(cache, kept).needs
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
    """The folders of what belongs to generations."""
    return [
        folder
        for folder in folders(cache)
        if folder.name in ("fragments", "packs", "documents", "lengths", "splits", "idx")
    ]


def _old_generations(cache: Path, needed: set[str], before: float) -> list[str]:
    """Digests of generations that are not needed, and were not the newest any more at the time `before`."""
    found, by_arrival = [], list_snapshots(cache)
    for place, digest in enumerate(by_arrival[:-1]):
        folder = generations(cache) / digest
        ended = min(_took_over(folder, generations(cache) / newer) for newer in by_arrival[place + 1 :])
        is_known = build_sequence(folder) >= 0  # of the others the order is not known: one of them may be the newest
        if is_known and digest not in needed and ended < before:
            found.append(digest)
    return found


def _took_over(folder: Path, newer: Path) -> float:
    """When a generation that arrived later came to be the newest, at the latest.

    Roots are written whenever a build arrives at a generation, the manifest when it is made: where that was after the older one's
    last arrival, it tells, however often the newer one was built again since.
    """
    made = (newer / MANIFEST).stat().st_mtime
    if build_sequence(folder) >= 0 and made <= (folder / ROOTS).stat().st_mtime:
        return (newer / ROOTS).stat().st_mtime
    return made


class _Held:
    """What the generations that stay hold, by the names that the rest of the cache has for it."""

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
            with contextlib.suppress(CacheError):  # a damaged one goes
                pack = Pack(packs(cache) / name)
                if not self._contents.isdisjoint(pack.contents()):
                    self._packs.add(name)
                    self._packed.add(pack)

    def needs(self, path: Path) -> bool:
        """Whether one of the generations has a use for what lies at `path`."""
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
