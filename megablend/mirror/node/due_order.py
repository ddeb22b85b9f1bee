"""Sorts pages by due time, which is the order in which they are fetched."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from megablend.mirror.disk.pages import PAGE_BYTES, PORTION_BLOCKS, count_each, merge_rows
from megablend.mirror.disk.room import Need, concatenate
from megablend.mirror.node.engine import SOON_SECONDS, Want


def order_by_due(needs: Sequence[Need]) -> Iterator[Want]:
    """Divide needs into parts, sorted by due time. The pages of a part are in one portion of a
    file, and due within the same second. Pages without a due time are left out.

    The rows are sorted at once, but each part is made only when the iterator reaches it.
    """
    if not needs:
        return iter(())
    counts = [len(need.pages.blocks) for need in needs]
    need_index = np.repeat(np.arange(len(needs), dtype=np.uint32), counts)
    all_pages, due = concatenate(needs)
    # Whole seconds, so that parts are larger: a second more or less does not matter
    seconds = np.floor(due)
    order = np.lexsort((all_pages.blocks, need_index, seconds))
    order = order[: np.searchsorted(seconds[order], math.inf)]
    begins_part = np.diff(seconds[order]) > 0
    begins_part |= np.diff(need_index[order]) != 0
    begins_part |= np.diff(all_pages.blocks[order] // PORTION_BLOCKS) != 0
    edges = [0, *(np.flatnonzero(begins_part) + 1).tolist(), len(order)]

    def parts() -> Iterator[Want]:
        for begin, stop in itertools.pairwise(edges):
            rows = order[begin:stop]
            if len(rows):
                key = needs[need_index[rows[0]]].key
                yield Want(key, merge_rows(all_pages.at(rows)), float(due[rows].min()))

    return parts()


def find_lead(needs: Sequence[Need], size: int) -> float:
    """Return the number of seconds until `size` bytes of the needs are due, at most
    SOON_SECONDS."""
    if not needs:
        return SOON_SECONDS
    pages, due_at = concatenate(needs)
    due = due_at - time.monotonic()
    coming = np.flatnonzero((due >= 0) & (due < SOON_SECONDS))
    ordered = coming[np.argsort(due[coming])]
    sizes = PAGE_BYTES * count_each(pages.masks[ordered])
    row = int(np.searchsorted(np.cumsum(sizes), size))
    return float(due[ordered[row]]) if row < len(ordered) else SOON_SECONDS
