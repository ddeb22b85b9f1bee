"""Assign items to ranks: the most expensive item first, each to the rank with the least work so far
(longest processing time first)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign_longest_first(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assign items to ranks by cost, deterministically.

    Args:
        costs: the cost of each item, in any unit.
        num_ranks: at least 1.

    Returns: for each rank the numbers of its items, most expensive first. The largest load is at
        most 4/3 of the optimum.
    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    items: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap, with the least load in front
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = loads[0]
        items[rank].append(item)
        heapq.heapreplace(loads, (load + costs[item], rank))
    return items
