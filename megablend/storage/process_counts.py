"""Counts of events and bytes in all readers and storages of this process since it was started."""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias

from megablend.system.after_fork import ProcessLock

CounterName: TypeAlias = Literal[
    "retries", "mirror_bytes", "source_bytes", "peer_bytes", "direct_bytes"
]
"""The name of a counter, which is a field of `prefetch.read_counts.ReadCounts`."""

_counting = ProcessLock()
_counts = Counter[str]()  # replaced, never changed: read with every batch, counted rarely


def count(name: CounterName, number: int = 1) -> None:
    """Add to a counter."""
    global _counts
    with _counting.lock:
        _counts = _counts + Counter({name: number})


def get_counts() -> Counter[str]:
    """Return all counters. The result is the same object until something is counted. A forked child
    continues from its parent's numbers."""
    return _counts
