"""Assigns items to ranks by the longest-processing-time-first rule: the most expensive item is
assigned first, and each item goes to the rank with the least work so far."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign_longest_first(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assign items to ranks so that the total costs of all ranks are similar. Deterministic.

    Args:
        costs: the cost of each item, in any unit.
        num_ranks: the number of ranks, at least 1.

    Returns: for each rank, the indices of its items in `costs`, the most expensive item first. The
        largest total cost of a rank is at most 4/3 of the optimum.
    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    items: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap of (load, rank), the least load first
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = loads[0]
        items[rank].append(item)
        heapq.heapreplace(loads, (load + costs[item], rank))
    return items
