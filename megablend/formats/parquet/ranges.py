"""Which pages are fetched by one read: a pure plan."""

from __future__ import annotations

from collections.abc import Sequence

MERGED_BYTES = 4 << 20
"""Pages are read together up to so many bytes; one alone may be larger."""
WASTE = 32
"""Of the bytes read, at most one in so many lies between pages that are wanted."""


def plan_reads(offsets: Sequence[int], sizes: Sequence[int], loads: Sequence[int]) -> list[tuple[range, int, int]]:
    """Runs of pages that are close enough to be read together.

    Args:
        offsets: of each page, its first byte; ascending.
        sizes: of each page, in bytes.
        loads: what each page adds to the MERGED_BYTES of its run.

    Returns: for each run its pages, the first byte, the byte after the last.
    """
    runs = []
    begin = first = stop = load = gaps = 0
    for i, (offset, size, adds) in enumerate(zip(offsets, sizes, loads, strict=True)):
        gap = offset - stop
        gaps += gap
        load += adds
        if i == begin or gap < 0 or gaps * WASTE > offset + size - first or load > MERGED_BYTES:
            if i > begin:
                runs.append((range(begin, i), first, stop))
            begin, first, load, gaps = i, offset, adds, 0
        stop = offset + size
    if offsets:
        runs.append((range(begin, len(offsets)), first, stop))
    return runs
