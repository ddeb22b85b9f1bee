"""Map a function over items with several threads, so that many reads are in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def parallel_map(work: Callable[[T], R], items: Sequence[T], in_flight: int) -> list[R]:
    """Apply `work` to each item with `in_flight` threads, and return the results in order. The
    calling thread does the work if one thread is enough."""
    if in_flight < 2 or len(items) < 2:
        return list(map(work, items))
    with ThreadPoolExecutor(min(in_flight, len(items))) as threads:
        return list(threads.map(work, items))
