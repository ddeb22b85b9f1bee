"""Where the tokens of samples are: from (source, ordinal) to ranges of tokens of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.blocks.splits import SplitBlocks
from megablend.index.snapshot import Snapshot
from megablend.order.base import Order, Spans, by_value, join_spans
from megablend.order.changing import ChangingOrder
from megablend.order.registry import find_order


class OrderChange(NamedTuple):
    """An order, and when the sources begin to use it."""

    order: str
    """A name of `ORDERS`."""
    epochs: npt.NDArray[np.int64]
    """int64 [num_sources]: the first epoch of each source that has it."""


class Locator:
    """The orders of one split's sources, each created on first use.

    Args:
        snapshot: the index.
        parts: PART_DTYPE [num_sources], the documents of each source that belong to the split.
        appends_eod: [num_sources], whether an end-of-document token follows each document.
        keys: [num_sources], random keys of the sources' orders.
        orders: at least one; of each source, epochs ascend from 0.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        parts: npt.NDArray[np.void],
        appends_eod: Sequence[bool],
        keys: Sequence[int],
        orders: Sequence[OrderChange],
    ) -> None:
        self._snapshot, self._parts = snapshot, parts
        self._appends_eod, self._keys = tuple(appends_eod), tuple(keys)
        self._changes = tuple(orders)
        self._orders: dict[int, Order] = {}

    def blocks(self, source: int) -> SplitBlocks:
        """The source's blocks in this split."""
        return SplitBlocks(self._snapshot, self._parts[source], eod=self._appends_eod[source])

    def order(self, source: int) -> Order:
        """How the source's samples are arranged over its blocks."""
        if source not in self._orders:
            self._orders[source] = self._make_order(source)
        return self._orders[source]

    def _make_order(self, source: int) -> Order:
        blocks, key = self.blocks(source), self._keys[source]
        by_epoch = {int(change.epochs[source]): change.order for change in self._changes}  # the last one for an epoch
        orders = [(epoch, find_order(name).make(blocks, key)) for epoch, name in by_epoch.items()]
        return orders[0][1] if len(orders) == 1 else ChangingOrder(blocks, orders)

    def locate_tokens(
        self, sources: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], lengths: int | npt.NDArray[np.int64]
    ) -> Spans:
        """Where the tokens of samples are stored, including the extra one.

        Args:
            sources: int32 [n].
            starts: int64 [n], first token of each sample, counted over all epochs of its source.
            lengths: tokens of a sample, including the extra one: one number, or int64 [n].

        Returns: spans of rows 0 to n - 1; `blocks` are block numbers of the snapshot; `starts` and `stops` are positions in a
            block's tokens as the store returns them.
        """
        parts = []
        for source, rows in by_value(sources):
            blocks = self.blocks(source)
            spans = self.order(source).spans(starts[rows], lengths if isinstance(lengths, int) else lengths[rows])
            clips = blocks.clips(spans.blocks)
            columns = spans.blocks + blocks.first_block, spans.starts + clips, spans.stops + clips
            parts.append(Spans(rows[spans.rows], spans.epochs, *columns))
        return join_spans(parts)
