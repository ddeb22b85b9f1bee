"""Which pages, or other ranges of bytes, are fetched by one read: pure plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megablend.storage.base import ReadLimits

Int64s = npt.NDArray[np.int64]


def plan_reads(
    offsets: Sequence[int], sizes: Sequence[int], loads: Sequence[int], limits: ReadLimits
) -> list[tuple[range, int, int]]:
    """Runs of pages that are close enough to be read together.

    Args:
        offsets: of each page, its first byte; ascending.
        sizes: of each page, in bytes.
        loads: what each page adds to the `max_merged_bytes` of its run.
        limits: those of the storage.

    Returns: for each run its pages, the first byte, the byte after the last.
    """
    runs, max_gap_bytes, max_merged_bytes = [], limits.max_gap_bytes, limits.max_merged_bytes
    begin = first = stop = load = 0
    for i, (offset, size, adds) in enumerate(zip(offsets, sizes, loads, strict=True)):
        load += adds
        if i == begin or not 0 <= offset - stop <= max_gap_bytes or load > max_merged_bytes:
            if i > begin:
                runs.append((range(begin, i), first, stop))
            begin, first, load = i, offset, adds
        stop = offset + size
    if offsets:
        runs.append((range(begin, len(offsets)), first, stop))
    return runs


def portions(sizes: Int64s, max_bytes: int) -> list[slice]:
    """Cut things of `sizes` int64 [n] into neighbours that take about `max_bytes` together, or one that takes more."""
    numbers = (np.cumsum(sizes, dtype=np.int64) - 1) // max_bytes
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(sizes)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds) if end > begin]


def merge_ranges(offsets: Int64s, sizes: Int64s, max_gap_bytes: int) -> tuple[Int64s, Int64s, Int64s]:
    """Join ranges with no more than `max_gap_bytes` between them.

    Args:
        offsets, sizes: int64 [n], in bytes, in any order.

    Returns: the first byte of each run, and the byte after its last, int64 [num_runs]; the run of each range, int64 [n].
    """
    order = np.argsort(offsets, kind="stable")
    starts, stops = offsets[order], np.maximum.accumulate((offsets + sizes)[order])
    begins = np.ones(len(order), bool)
    begins[1:] = starts[1:] - stops[:-1] > max_gap_bytes
    runs = np.empty(len(order), np.int64)
    runs[order] = np.cumsum(begins) - 1
    return starts[begins], stops[np.append(begins[1:], True)[: len(order)]], runs
