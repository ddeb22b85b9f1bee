"""Which pages are fetched by one read: a pure plan."""

from __future__ import annotations

from collections.abc import Sequence

MERGED_BYTES = 4 << 20
"""Pages are read together up to so many bytes; one alone may be larger."""
GAP_BYTES = 2 << 10
"""Bytes between two pages are read along up to so many: a read of its own costs more. Pages themselves are larger."""


def plan_reads(offsets: Sequence[int], sizes: Sequence[int], loads: Sequence[int]) -> list[tuple[range, int, int]]:
    """Runs of pages that are close enough to be read together.

    Args:
        offsets: of each page, its first byte; ascending.
        sizes: of each page, in bytes.
        loads: what each page adds to the MERGED_BYTES of its run.

    Returns: for each run its pages, the first byte, the byte after the last.
    """
    runs = []
    begin = first = stop = load = 0
    for i, (offset, size, adds) in enumerate(zip(offsets, sizes, loads, strict=True)):
        load += adds
        if i == begin or not 0 <= offset - stop <= GAP_BYTES or load > MERGED_BYTES:
            if i > begin:
                runs.append((range(begin, i), first, stop))
            begin, first, load = i, offset, adds
        stop = offset + size
    if offsets:
        runs.append((range(begin, len(offsets)), first, stop))
    return runs
