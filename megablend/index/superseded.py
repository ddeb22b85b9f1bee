"""Which snapshots of a cache are no longer the newest, and since when."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megablend.caches.base import CacheStore, Entry
from megablend.index.list_snapshots import build_sequence


def find_superseded(store: CacheStore, entries: Mapping[str, Entry], complete: Collection[str]) -> dict[str, float]:
    """Digests of the snapshots that are certainly not the newest, the oldest first: the latest time at which one ceased to be.

    Args:
        entries: of the snapshots, by digest.
        complete: digests of those that can be the newest.
    """
    sequences = {digest: build_sequence(store, digest) for digest in entries}
    by_arrival = sorted(entries, key=lambda digest: (sequences[digest], digest))
    found = {}
    for place, digest in enumerate(by_arrival):
        entry, newer = entries[digest], [entries[other] for other in by_arrival[place + 1 :] if other in complete]
        if sequences[digest] < 0:  # its record is damaged: it may be the newest, unless another was committed since
            times = [each.committed for each in newer if sequences[each.name] >= 0 and each.committed > entry.committed]
        else:
            times = [_took_over(entry, each) for each in newer]
        if times:
            found[digest] = min(times)
    return found


def _took_over(entry: Entry, newer: Entry) -> float:
    """The latest time at which a later snapshot became the newest.

    A snapshot is committed again by every build that results in it. If it was created after the last build of the older one, that
    is the time, no matter how often the newer one was rebuilt since.
    """
    return newer.committed if newer.created <= entry.committed else newer.created
