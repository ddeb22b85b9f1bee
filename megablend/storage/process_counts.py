"""What this process, by all its readers and storages together, has done since it was started."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Literal, TypeAlias

Counted: TypeAlias = Literal[
    "retries", "mirror_bytes", "source_bytes", "peer_bytes", "direct_bytes"
]
"""The name of a counter, which is that of a field of `prefetch.read_counts.ReadCounts`."""

_lock = threading.Lock()
_counts = Counter[str]()  # replaced, never changed: asked for with every batch, counted rarely


def count(name: Counted, number: int = 1) -> None:
    """Add to a counter."""
    global _counts
    with _lock:
        _counts = _counts + Counter({name: number})


def get_counts() -> Counter[str]:
    """Return all counters so far, the same object until something is counted; a forked child goes
    on from its parent's numbers."""
    return _counts


def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)
