"""Blocks in the order of the files, the same in every epoch."""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int64s
from megablend.kernels.blend.spans import count_cuts, cut
from megablend.order.base import Blocks, Placed, Spans, join_spans

LISTED_BLOCKS = 1 << 15
"""Of sources with up to this many blocks, all edges are looked up at once: that costs less than a
binary search, whose every step looks up some."""
KEPT_BLOCKS = 1 << 9
"""Of sources with up to this many blocks, edges are kept: a window of many sources looks all of
them up."""


class SequentialOrder:
    """No shuffling; `key` is unused."""

    def __init__(self, blocks: Blocks, key: int, *, listed: int = LISTED_BLOCKS) -> None:
        self._blocks = blocks
        self._is_listed = blocks.num_blocks <= listed
        self._edges: Int64s | None = None
        self.memory_bytes = 0
        if blocks.num_blocks <= min(KEPT_BLOCKS, listed):
            self.memory_bytes = 8 * (blocks.num_blocks + 1)

    def precompute(self) -> None:
        """Do nothing: there is nothing to store."""

    def spans(self, starts: Int64s, length: int | Int64s) -> Spans:
        """Locate ranges of `length` tokens from each of `starts` int64 [n]; see Order.spans."""
        parts = list[Spans]()
        rows = np.arange(len(starts))
        stops = starts + length
        if len(starts):
            epoch = int(starts.min()) // self._blocks.num_tokens
            begin = epoch * self._blocks.num_tokens
            # All in one epoch, as mostly
            if stops.max() <= begin + self._blocks.num_tokens:
                inside = self.cut(starts - begin, stops - begin)
                return inside._replace(epochs=np.full(len(inside.rows), epoch))
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

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Where an epoch reads stored tokens [starts, stops), int64 [n] each; see
        Order.find_tokens."""
        first = epoch * self._blocks.num_tokens
        return Placed(np.arange(len(starts)), starts, first + starts, first + stops)

    def cut(self, starts: Int64s, stops: Int64s) -> Spans:
        """Split tokens [starts, stops) of epoch 0, int64 [n] each, none empty, at block
        boundaries."""
        if self._is_listed:
            edges = self._edges
            if edges is None:
                edges = self._blocks.before(np.arange(self._blocks.num_blocks + 1))
                self._edges = edges if self.memory_bytes else None
            cuts = np.empty((4, count_cuts(edges, starts, stops)), np.int64)
            cut(edges, starts, stops, cuts)
            return Spans(cuts[0], np.zeros(len(cuts[0]), np.int64), cuts[1], cuts[2], cuts[3])
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
