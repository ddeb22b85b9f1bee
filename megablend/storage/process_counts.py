"""Counts of what all readers and storages of this process have done since it was started."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Literal, TypeAlias

CounterName: TypeAlias = Literal[
    "retries", "mirror_bytes", "source_bytes", "peer_bytes", "direct_bytes"
]
"""The name of a counter, which is a field of `prefetch.read_counts.ReadCounts`."""

_lock = threading.Lock()
_counts = Counter[str]()  # replaced, never changed: read with every batch, counted rarely


def count(name: CounterName, number: int = 1) -> None:
    """Add to a counter."""
    global _counts
    with _lock:
        _counts = _counts + Counter({name: number})


def get_counts() -> Counter[str]:
    """Return all counters: the same object until something is counted. A forked child continues
    from its parent's numbers."""
    return _counts


def _unlock() -> None:
    """Replace the lock after a fork: a thread that the child does not have may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
