"""Garbage collection: remove unneeded files from a cache. The following are removed:

    snapshots     all but the newest and those that runs use
    fragments     of files that are in no kept snapshot, or that are in a pack; fragments of parts of large files
    packs         without files of a kept snapshot
    documents     document tables (and `lengths`) of files that are in no kept snapshot
    idx           digests of `.idx` files that are in no kept snapshot
    checksums     of snapshots that no longer exist
    splits        results computed from snapshots and document tables that no longer exist
Nothing is removed until it has been unused for a few days: a job may have opened a snapshot while
it was the newest, and a build that was killed continues from its fragments. A snapshot is removed
atomically, so that it is either complete or absent; an interrupted collection is continued by the
next one, or by a build.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from megablend.caches.base import CHECKSUMS, DOCUMENTS, SNAPSHOTS, CacheStore
from megablend.caches.find import CacheLike, find_existing
from megablend.errors import CacheError
from megablend.index.build.fragments import fragment_content, is_part
from megablend.index.build.packs import Pack, Packed
from megablend.index.read.document_table import table_key
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.cache_folders import fragments
from megablend.index.tables.list_snapshots import find_superseded, list_snapshots
from megablend.system.atomic_write import translate_os_errors

_KINDS = ("fragments", "packs", DOCUMENTS, CHECKSUMS, "lengths", "splits", "idx")
"""Kinds of files and folders that are kept as long as a kept snapshot needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The result of a garbage collection: the items that were removed or, in a dry run, would be
    removed."""

    snapshots: tuple[str, ...]
    """Digests of removed snapshots, oldest first."""
    kept: tuple[str, ...]
    """Digests of the snapshots that are kept."""
    others: int
    """Number of other removed files: fragments, packs, document tables, splits."""
    bytes: int
    """Total size of everything removed."""


def collect(
    cache: CacheLike,
    needed: Callable[[], Collection[str]],
    *,
    min_age_seconds: float,
    dry_run: bool,
) -> Collected:
    """Remove files that are not needed and have not been used for `min_age_seconds`, according to
    the clock of the cache's store.

    Args:
        needed: a function that returns the digests of snapshots to keep in addition to the newest;
            called while the cache is locked.
        dry_run: whether to remove nothing, and only report what would be removed.

    Raises: CacheError if there is no cache, if a build is running or may be running, or if a kept
        snapshot is damaged; the errors of `needed`.
    """
    store = find_existing(cache)
    # A dry run writes nothing, not even a lock, since its user may have no write permission
    held = contextlib.nullcontext() if dry_run else store.hold(wait_seconds=0)
    with translate_os_errors(store.folder), held as lock:
        if lock is not None and not lock.exclusive:
            raise CacheError(
                f"{store.location}: the file system has no locks, so a running build cannot be detected; copy the cache to one "
                f"that has locks, or remove {fragments(store.folder)} while no build is running"
            )
        deadline = (time.time() if dry_run else store.now()) - min_age_seconds
        snapshots = {entry.name: entry for entry in store.list_entries(SNAPSHOTS)}
        by_arrival = list_snapshots(store)
        in_use = set(needed())
        superseded = find_superseded(store, snapshots, by_arrival)
        old = [
            digest
            for digest, ended in superseded.items()
            if digest not in in_use and ended < deadline
        ]
        kept = tuple(digest for digest in by_arrival if digest not in old)
        needs = _KeptContents(store, kept).needs
        others = [
            (kind, entry)
            for kind in _KINDS
            for entry in store.list_entries(kind)
            if entry.committed < deadline and not needs(kind, entry.name)
        ]
        removed = [*((SNAPSHOTS, snapshots[digest]) for digest in old), *others]
        if not dry_run:
            for kind, entry in removed:
                store.remove(kind, entry.name)
        num_left, bytes_left = store.collect_leftovers(deadline, dry_run=dry_run)
    return Collected(
        snapshots=tuple(old),
        kept=kept,
        others=len(others) + num_left,
        bytes=sum(entry.bytes for _, entry in removed) + bytes_left,
    )


class _KeptContents:
    """Finds out which other files and folders of the cache the kept snapshots need."""

    def __init__(self, store: CacheStore, kept: Collection[str]) -> None:
        self._store = store
        self._contents: set[tuple[str, str]] = set()
        self._files: set[str] = set()
        self._tables: set[str] = set()
        self._snapshots = set(kept)
        self._structures: set[str] = set()
        self._packs: set[str] = set()
        self._packed = Packed()
        for digest in kept:
            snapshot = open_snapshot(store, digest)
            contents = snapshot.files.contents()
            self._contents.update(contents)
            self._structures.update(structure for structure, _ in contents)
            for number, source in enumerate(snapshot.sources):
                self._files.update(snapshot.files.keys(source))
                self._tables.add(table_key(snapshot, number))
        for name in store.list_files("packs"):
            with contextlib.suppress(CacheError):  # a damaged pack is removed
                pack = Pack(store.fetch_file("packs", name))
                if not self._contents.isdisjoint(pack.contents()):
                    self._packs.add(name)
                    self._packed.add(pack)

    def needs(self, kind: str, name: str) -> bool:
        """Return whether a kept snapshot needs a file or folder."""
        owner = name.partition("-")[0]
        if kind == "fragments":
            if is_part(name) or name in self._packed:
                return False
            return fragment_content(self._store.fetch_file(kind, name)) in self._contents
        if kind == "packs":
            return name in self._packs
        if kind == "idx":
            return name in self._structures
        if kind == "lengths":
            return owner in self._files
        # Other kinds (document tables, checksums, `splits`) are named after the table or snapshot
        # they belong to
        if owner in self._tables:
            return True
        return kind in ("splits", CHECKSUMS) and owner in self._snapshots
