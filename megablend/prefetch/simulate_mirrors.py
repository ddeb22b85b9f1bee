"""Simulate the mirrors of a job's nodes: which pages each mirror keeps, and which node sends a page
that another node lacks.

A page is read from the source if no node holds it. It is kept by the node that reads it and by the
first home of the piece that contains it. A node evicts the pages that it will need last.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s


class PageReads(NamedTuple):
    """Reads of pages, in order of time. If a node reads a page twice for one step, this counts as
    one read. The fields are arrays of int64 [n]."""

    pages: Int64s
    """Number of the page that is read, unique over all files."""
    times: Int64s
    """First sample of the step for which the page is read."""
    nodes: Int64s
    """Number of the node that reads the page."""


def simulate(
    reads: PageReads, homes: Int64s, num_nodes: int, room: int | None
) -> tuple[Int64s, Int64s]:
    """Simulate reads of pages, one after another. Pages that are not needed again are evicted
    first, starting with the one that was read longest ago.

    Args:
        homes: int64 [n, copies], the homes of the page of each read.
        room: number of pages that a node can hold; None for any number.

    Returns: for each read, how often its page is sent by the source (0 or 1), int64 [n]; and how
        often it is sent by one node to another, int64 [n].
    """
    count = len(reads.pages)
    next_of_all = _find_next(reads.pages, np.zeros_like(reads.nodes))
    next_of_node = _find_next(reads.pages, reads.nodes)
    mirrors = [_Mirror(room) for _ in range(num_nodes)]
    holders_of: dict[int, set[int]] = {}
    source = np.zeros(count, np.int64)
    network = np.zeros(count, np.int64)
    rows = zip(
        reads.pages.tolist(),
        reads.nodes.tolist(),
        homes.tolist(),
        next_of_all.tolist(),
        next_of_node.tolist(),
        strict=True,
    )
    for i, (page, node, (home, *other_homes), needed_by_all, needed_by_node) in enumerate(rows):
        holders = holders_of.setdefault(page, set())
        holders -= {holder for holder in holders if not mirrors[holder].holds(page)}
        is_lacking = node not in holders
        if is_lacking:
            source[i] = not holders
            # The home gets the page, from the source or a node that holds it, and sends it to the
            # reading node
            network[i] = (bool(holders) and home not in holders) + (home != node)
        if (is_lacking or home in holders) and mirrors[home].keep(page, needed_by_all):
            holders.add(home)
        if node != home and mirrors[node].keep(page, needed_by_node):
            holders.add(node)
        if is_lacking:
            # Further copies are only for failures, so they are kept like pages that no node needs
            # again
            for other in other_homes:
                if other not in holders and mirrors[other].keep(page, 2 * count - i):
                    holders.add(other)
                    network[i] += 1
    return source, network


class _Mirror:
    """The mirror of a node.

    Args:
        room: number of pages that the mirror can hold; None for any number.
    """

    def __init__(self, room: int | None) -> None:
        self._room = room
        # For each held page: the number of the read that needs it next
        self._next_reads: dict[int, int] = {}
        # (-next read, page); also entries of pages that were evicted or whose next read has changed
        # since
        self._queue: list[tuple[int, int]] = []

    def holds(self, page: int) -> bool:
        """Return whether the mirror holds a page."""
        return page in self._next_reads

    def keep(self, page: int, next_read: int) -> bool:
        """Keep a page; if there is no room, evict the pages that are needed last. Return whether
        the page itself was kept."""
        self._next_reads[page] = next_read
        if self._room is None:
            return True
        heapq.heappush(self._queue, (-next_read, page))
        while len(self._next_reads) > self._room:
            negative, last_needed = heapq.heappop(self._queue)
            if self._next_reads.get(last_needed) == -negative:
                del self._next_reads[last_needed]
        return page in self._next_reads


def _find_next(pages: Int64s, nodes: Int64s) -> Int64s:
    """Return, for each read, the number of the next read of the same page by the same node (int64
    [n]). If there is none, return a number greater than that of any read; it is greater for earlier
    reads."""
    count = len(pages)
    order = np.lexsort((nodes, pages))
    is_same = (np.diff(pages[order]) == 0) & (np.diff(nodes[order]) == 0)
    next_reads = 2 * count - np.arange(count)
    next_reads[order[:-1][is_same]] = order[1:][is_same]
    return next_reads
