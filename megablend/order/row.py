"""Documents shuffled anew in every epoch, laid end to end, cut: full randomness, at the cost of reading a page a document.

The documents are laid out as the page order lays out blocks; where a document's tokens lie in the blocks is found as the
sequential order finds it. Up to THRESHOLD documents an epoch is one exact shuffle of them. Above, they are dealt in turn to as
many groups as keep each near GROUP_DOCUMENTS, so that neighbours are never in one group, and what an epoch takes in memory stays
flat. Both numbers are part of the order: another value gives another sequence of tokens.
"""

from __future__ import annotations

from megablend.order.base import Int64s, Placed, RowBlocks, Spans
from megablend.order.page import PageOrder
from megablend.order.sequential import SequentialOrder

THRESHOLD = 1 << 16
GROUP_DOCUMENTS = 1 << 15


class RowOrder:
    """Every epoch a permutation of the documents, chosen by (key, epoch). The keywords are changed by tests alone."""

    def __init__(
        self, blocks: RowBlocks, key: int, *, threshold: int = THRESHOLD, group: int = GROUP_DOCUMENTS
    ) -> None:
        self._documents = blocks.documents
        count = self._documents.num_blocks
        self._shuffled = PageOrder(self._documents, key, threshold=threshold, groups=-(-count // group), runs=count)
        self._in_place = SequentialOrder(blocks, key)
        self.memory_bytes = self._shuffled.memory_bytes

    def keep(self) -> None:
        """Keep the totals of the groups with the index, where there are groups. Raises CacheError."""
        self._shuffled.keep()

    def spans(self, starts: Int64s, length: int) -> Spans:
        """Stretches of `length` tokens from each of `starts` int64 [n]; see Order.spans."""
        rows, epochs, documents, first, stop = self._shuffled.spans(starts, length)
        before = self._documents.before(documents)
        found = self._in_place.cut(before + first, before + stop)
        return Spans(rows[found.rows], epochs[found.rows], found.blocks, found.starts, found.stops)

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Where stored tokens [starts, stops), int64 [n] each, come in an epoch; see Order.find_tokens."""
        return self._shuffled.find_tokens(epoch, starts, stops)
