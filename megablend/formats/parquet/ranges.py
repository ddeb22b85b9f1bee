"""Which pages are fetched by one read: a pure plan."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MERGED_BYTES = 4 << 20
"""Pages are read, and decoded, together up to so many bytes; one alone may be larger."""
WASTE = 32
"""Of the bytes read, at most one in so many lies between pages that are wanted."""


def plan_reads(
    offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], loads: npt.NDArray[np.int64]
) -> list[tuple[slice, int, int]]:
    """Runs of pages that are close enough to be read together.

    Args:
        offsets: int64 [n], ascending: bytes at which pages begin.
        sizes: int64 [n], bytes.
        loads: int64 [n], bytes that each page adds to the MERGED_BYTES of its run.

    Returns: for each run its pages, the first byte, the byte after the last.
    """
    runs: list[tuple[slice, int, int]] = []
    begin = first = stop = load = gaps = 0
    for i, (offset, size, adds) in enumerate(zip(offsets.tolist(), sizes.tolist(), loads.tolist(), strict=True)):
        gap = offset - stop
        gaps += max(0, gap)
        load += adds
        if i == begin or gap < 0 or gaps * WASTE > offset + size - first or load > MERGED_BYTES:
            if i > begin:
                runs.append((slice(begin, i), first, stop))
            begin, first, load, gaps = i, offset, adds, 0
        stop = offset + size
    if len(offsets):
        runs.append((slice(begin, len(offsets)), first, stop))
    return runs
