"""The sequential order: blocks in the order of the files, the same in every epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megablend.arrays import Int64s
from megablend.order.base import Blocks, Placed, Spans, by_value, find_blocks
from megablend.order.listed import ListedOrder, Listing, Stretch

LISTED_BLOCKS = 1 << 15
"""If a source has at most this many blocks, the edges of all blocks are looked up together. A
single lookup of all edges costs less than the many lookups of a binary search."""
RUN_BLOCKS = 1 << 9
"""Number of neighbouring blocks of a larger source whose edges are looked up together."""
KEPT_BLOCKS = 1 << 9
"""If a source has at most this many blocks, their edges are kept in memory, since a window of many
sources needs all edges of each source repeatedly."""


class SequentialOrder(ListedOrder):
    """An order that does not shuffle blocks. It ignores `key`."""

    def __init__(self, blocks: Blocks, key: int, *, listed: int = LISTED_BLOCKS) -> None:
        self._blocks = blocks
        self._run = blocks.num_blocks if blocks.num_blocks <= listed else RUN_BLOCKS
        self._listing: Listing | None = None
        self.memory_bytes = 0
        if blocks.num_blocks <= min(KEPT_BLOCKS, listed):
            self.memory_bytes = 16 * (blocks.num_blocks + 1)

    def precompute(self) -> None:
        """Do nothing, since there is nothing to store."""

    def stretches(
        self, starts: Int64s, low: int, high: int
    ) -> Iterator[tuple[Int64s | slice, Stretch]]:
        """Yield runs of neighbouring blocks, or one run of all blocks; see
        ListedOrder.stretches."""
        for epoch, inside in self._by_epoch(starts, low, high):
            first = epoch * self._blocks.num_tokens
            if self._run == self._blocks.num_blocks:
                yield inside, (epoch, first, self._list_run(0))
                continue
            blocks = find_blocks(self._blocks, starts[inside] - first)
            for run, in_run in by_value(blocks // self._run):
                begin = int(self._blocks.before(np.array([run * self._run]))[0])
                yield (
                    np.arange(len(starts))[inside][in_run],
                    (epoch, first + begin, self._list_run(run)),
                )

    def _list_run(self, run: int) -> Listing:
        """Return the listing of a run of neighbouring blocks, given by its number."""
        if self._listing is not None:
            return self._listing
        blocks = np.arange(run * self._run, min((run + 1) * self._run, self._blocks.num_blocks) + 1)
        edges = self._blocks.before(blocks)
        listing = Listing.of(blocks[:-1], edges - edges[0] if run else edges)
        if self.memory_bytes:
            self._listing = listing
        return listing

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Return the positions at which an epoch reads stored tokens; see Order.find_tokens."""
        first = epoch * self._blocks.num_tokens
        return Placed(np.arange(len(starts)), starts, first + starts, first + stops)

    def cut(self, starts: Int64s, stops: Int64s) -> Spans:
        """Split ranges [starts, stops) of tokens of epoch 0 at block boundaries (int64 [n]). No
        range may be empty."""
        return self.spans(starts, stops - starts)
