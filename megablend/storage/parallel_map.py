"""Map a function over items with several threads, so that many reads are in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_BATCH_ITEMS = 32
"""The number of items that a thread takes at once: handing them out one by one costs more than
reading small files from memory."""
_WAIT_FACTOR = 2
"""The ratio of elapsed time to processor time above which a batch is assumed to have waited for
files."""


def parallel_map(work: Callable[[T], R], items: Sequence[T], in_flight: int) -> list[R]:
    """Apply `work` to each item with `in_flight` threads, and return the results in order. The
    calling thread does the work if one thread is enough."""
    if in_flight < 2 or len(items) < 2:
        return list(map(work, items))
    with ThreadPoolExecutor(min(in_flight, len(items))) as threads:
        return list(threads.map(work, items))


def read_clocks() -> tuple[float, float]:
    """Return the current time, and the processor time that this thread has used, both in
    seconds."""
    return time.perf_counter(), time.thread_time()


def map_waiting(
    work: Callable[[T], R],
    items: Sequence[T],
    in_flight: int,
    clocks: Callable[[], tuple[float, float]] = read_clocks,
) -> list[R]:
    """Apply `work`, which reads files, to each item, and return the results in order. The calling
    thread does the work until a read blocks; then `in_flight` threads do the rest.

    If the files are in the page cache, more threads would only wait for Python's lock.
    """
    # The first batch is a single item, since a read that has to wait may take a long time
    bounds = [0, *range(1, len(items), _BATCH_ITEMS), len(items)]
    batches = deque(items[begin:end] for begin, end in pairwise(bounds))
    results = list[R]()
    has_waited = False
    while batches and not has_waited:
        start, start_processor = clocks()
        results += map(work, batches.popleft())
        now, processor = clocks()
        has_waited = now - start > _WAIT_FACTOR * (processor - start_processor)
    rest = parallel_map(lambda batch: list(map(work, batch)), tuple(batches), in_flight)
    for batch_results in rest:
        results += batch_results
    return results
