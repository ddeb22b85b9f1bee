"""Which snapshots of the index a cache contains, and in which order they were built."""

from __future__ import annotations

from megablend.caches.base import SNAPSHOTS
from megablend.caches.find import CacheLike, find_store
from megablend.errors import CacheError
from megablend.index.manifest import ROOTS, parse_roots


def list_snapshots(cache: CacheLike) -> list[str]:
    """Digests of a cache's snapshots, the most recently built (or rebuilt) last; empty if there is no cache."""
    store = find_store(cache)
    return sorted(store.list_folders(SNAPSHOTS), key=lambda name: (build_sequence(store, name), name))


def build_sequence(cache: CacheLike, digest: str) -> int:
    """Number of the last build that resulted in a snapshot; -1 if unknown."""
    store = find_store(cache)
    try:
        data = store.read_member(SNAPSHOTS, digest, ROOTS)
        return int(parse_roots(store.folder / SNAPSHOTS / digest, data)["arrival"])
    except (CacheError, FileNotFoundError):
        return -1
