"""List the snapshots of the index that a cache contains, in the order in which they were built, and
find out when each was superseded by a newer one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from megablend.caches.base import SNAPSHOTS, CacheStore, Entry
from megablend.caches.find import CacheLike, find_store
from megablend.errors import CacheError
from megablend.index.tables.manifest import ROOTS, parse_roots


def list_snapshots(cache: CacheLike) -> list[str]:
    """Return the digests of a cache's snapshots. The most recently built (or rebuilt) snapshot is
    last. Return an empty list if there is no cache."""
    store = find_store(cache)
    # Sorting is stable, so those with the same number stay in the order of their names
    return sorted(store.list_folders(SNAPSHOTS), key=partial(build_sequence, store))


def build_sequence(store: CacheStore, digest: str) -> int:
    """Return the number of the last build that resulted in a snapshot, or -1 if the number is
    unknown."""
    try:
        data = store.read_member(SNAPSHOTS, digest, ROOTS)
        return int(parse_roots(store.folder / SNAPSHOTS / digest, data)["arrival"])
    except (CacheError, FileNotFoundError):
        return -1


def find_superseded(
    store: CacheStore, entries: Mapping[str, Entry], complete: Collection[str]
) -> dict[str, float]:
    """Find the snapshots that are certainly not the newest.

    Args:
        entries: the snapshots' entries in the cache, by digest.
        complete: digests of the snapshots that can be the newest.

    Returns: digest -> the latest time at which the snapshot can have been superseded, oldest
        snapshot first.
    """
    sequences = {digest: build_sequence(store, digest) for digest in entries}
    by_arrival = sorted(entries, key=lambda digest: (sequences[digest], digest))
    superseded = {}
    for position, digest in enumerate(by_arrival):
        entry = entries[digest]
        newer = [entries[other] for other in by_arrival[position + 1 :] if other in complete]
        # If the snapshot's record is damaged, the snapshot may be the newest, unless another was
        # committed since
        if sequences[digest] < 0:
            times = [
                other.committed
                for other in newer
                if sequences[other.name] >= 0 and other.committed > entry.committed
            ]
        else:
            times = [_time_superseded(entry, other) for other in newer]
        if times:
            superseded[digest] = min(times)
    return superseded


def _time_superseded(entry: Entry, newer: Entry) -> float:
    """Return the latest time at which `newer` can have replaced a snapshot as the newest one.

    A snapshot is committed again by every build that results in it. If `newer` was created after
    the last commit of the older snapshot, it superseded the older one when it was created, however
    often it was rebuilt since.
    """
    return newer.committed if newer.created <= entry.committed else newer.created
