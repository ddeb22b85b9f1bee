"""An order that changes between epochs: a source finishes an epoch in one order and begins the next
epoch in another order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megablend.arrays import Int64s
from megablend.order.base import Blocks, Order, Placed, Spans, join_spans

_FOREVER = 1 << 62
"""The position at which the last order ends."""


class ChangingOrder:
    """An order that consists of several orders, each of which applies from a given epoch on.

    Args:
        blocks: the source's blocks.
        orders: pairs (first epoch, order); the first epochs ascend from 0.
    """

    def __init__(self, blocks: Blocks, orders: Sequence[tuple[int, Order]]) -> None:
        self._blocks = blocks
        self._orders = tuple(orders)
        self.memory_bytes = sum(order.memory_bytes for _, order in orders)

    def precompute(self) -> None:
        """Compute the results that are slow to compute, and store them with the index. Raises:
        CacheError."""
        for _, order in self._orders:
            order.precompute()

    def spans(self, starts: Int64s, length: int | Int64s) -> Spans:
        """Locate ranges of `length` tokens, given their starts (int64 [n]); see Order.spans."""
        stops = starts + length
        parts = list[Spans]()
        edges = [epoch * self._blocks.num_tokens for epoch, _ in self._orders]
        for (low, high), (_, order) in zip(pairwise([*edges, _FOREVER]), self._orders, strict=True):
            firsts = np.maximum(starts, low)
            ends = np.minimum(stops, high)
            rows = np.flatnonzero(firsts < ends)
            if len(rows):
                inside = order.spans(firsts[rows], ends[rows] - firsts[rows])
                parts.append(inside._replace(rows=rows[inside.rows]))
        return join_spans(parts)

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Return the positions at which an epoch reads stored tokens; see Order.find_tokens."""
        order = next(order for first, order in reversed(self._orders) if epoch >= first)
        return order.find_tokens(epoch, starts, stops)
