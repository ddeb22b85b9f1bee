"""Blocks in the order of the files, the same in every epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megablend.arrays import Int64s
from megablend.order.base import Blocks, Placed, Spans, join_spans
from megablend.order.listed import ListedOrder, Listing, Stretch

LISTED_BLOCKS = 1 << 15
"""Of sources with up to this many blocks, all edges are looked up at once: that costs less than a
binary search, whose every step looks up some."""
KEPT_BLOCKS = 1 << 9
"""Of sources with up to this many blocks, edges are kept: a window of many sources looks all of
them up."""


class SequentialOrder(ListedOrder):
    """No shuffling; `key` is unused."""

    def __init__(self, blocks: Blocks, key: int, *, listed: int = LISTED_BLOCKS) -> None:
        self._blocks = blocks
        self.is_listed = blocks.num_blocks <= listed
        self._listing: Listing | None = None
        self.memory_bytes = 0
        if blocks.num_blocks <= min(KEPT_BLOCKS, listed):
            self.memory_bytes = 8 * (blocks.num_blocks + 1)

    def precompute(self) -> None:
        """Do nothing: there is nothing to store."""

    def spans(self, starts: Int64s, length: int | Int64s) -> Spans:
        """Locate ranges of `length` tokens from each of `starts` int64 [n]; see Order.spans."""
        if self.is_listed:
            return super().spans(starts, length)
        parts = list[Spans]()
        rows = np.arange(len(starts))
        stops = starts + length
        while len(rows := rows[(left := starts < stops)]):
            starts = starts[left]
            stops = stops[left]
            first = starts - starts % self._blocks.num_tokens
            ends = np.minimum(stops, first + self._blocks.num_tokens)
            inside = self.cut(starts - first, ends - first)
            epochs = first[inside.rows] // self._blocks.num_tokens
            parts.append(inside._replace(rows=rows[inside.rows], epochs=epochs))
            starts = ends
        return join_spans(parts)

    def stretches(
        self, starts: Int64s, low: int, high: int
    ) -> Iterator[tuple[Int64s | slice, Stretch]]:
        """All blocks, epoch by epoch; see ListedOrder.stretches."""
        listing = self._listing
        if listing is None:
            edges = self._blocks.before(np.arange(self._blocks.num_blocks + 1))
            listing = Listing.of(np.empty(0, np.uint8), edges)
            self._listing = listing if self.memory_bytes else None
        for epoch, inside in self._by_epoch(starts, low, high):
            yield inside, Stretch(epoch, epoch * self._blocks.num_tokens, listing)

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Where an epoch reads stored tokens [starts, stops), int64 [n] each; see
        Order.find_tokens."""
        first = epoch * self._blocks.num_tokens
        return Placed(np.arange(len(starts)), starts, first + starts, first + stops)

    def cut(self, starts: Int64s, stops: Int64s) -> Spans:
        """Split tokens [starts, stops) of epoch 0, int64 [n] each, none empty, at block
        boundaries."""
        if self.is_listed:
            return super().spans(starts, stops - starts)
        low = self._block_of(starts)
        counts = self._block_of(stops - 1) + 1 - low
        which = np.repeat(np.arange(len(starts)), counts)
        blocks = low[which] + np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        before = self._blocks.before(blocks)
        after = self._blocks.before(blocks + 1)
        columns = (
            which,
            np.zeros(len(which), np.int64),
            blocks,
            np.maximum(starts[which] - before, 0),
            np.minimum(stops[which], after) - before,
        )
        return Spans(*(column[after > before] for column in columns))

    def _block_of(self, tokens: Int64s) -> Int64s:
        """The blocks that contain `tokens` of epoch 0: int64 [n]."""
        low = np.zeros(len(tokens), np.int64)
        high = np.full(len(tokens), self._blocks.num_blocks)
        while (
            high - low > 1
        ).any():  # binary search; finished entries do not change: their middle is `low`
            middle = (low + high) // 2
            left = self._blocks.before(middle) <= tokens
            low = np.where(left, middle, low)
            high = np.where(left, high, middle)
        return low
