"""Which snapshots of the index a cache contains, and in which order they were built."""

from __future__ import annotations

from megablend.caches.base import GENERATIONS
from megablend.caches.find import CacheLike, find_store
from megablend.errors import CacheError
from megablend.index.manifest import ROOTS, parse_roots


def list_snapshots(cache: CacheLike) -> list[str]:
    """Digests of a cache's snapshots, the most recently built (or rebuilt) last; empty if there is no cache."""
    store = find_store(cache)
    return sorted(store.list_folders(GENERATIONS), key=lambda name: (build_sequence(store, name), name))


def build_sequence(cache: CacheLike, digest: str) -> int:
    """Number of the last build that resulted in a snapshot; -1 if unknown."""
    store = find_store(cache)
    try:
        data = store.read_member(GENERATIONS, digest, ROOTS)
        return int(parse_roots(store.folder / GENERATIONS / digest, data)["arrival"])
    except (CacheError, FileNotFoundError):
        return -1
