"""The document order: documents in a new random order every epoch, concatenated and split. It is a
full shuffle, at the cost of reading a block for each document.

Documents are shuffled in the same way as blocks in the block order; the sequential order locates a
document's tokens. With up to THRESHOLD documents, an epoch is one exact shuffle. The documents of
larger sources are assigned in turn to groups of about GROUP_DOCUMENTS, so that neighbours are never
in the same group and the memory of an epoch stays bounded. Both numbers are part of the order:
other values give another sequence of tokens.
"""

from __future__ import annotations

from megablend.arrays import Int64s
from megablend.order.base import DocumentBlocks, Placed, Spans
from megablend.order.block import BlockOrder
from megablend.order.sequential import SequentialOrder

THRESHOLD = 1 << 16
"""Maximum number of documents that are shuffled at one level."""
GROUP_DOCUMENTS = 1 << 15
"""Approximate number of documents in a group of a larger source."""


class DocumentOrder:
    """An order in which every epoch is a permutation of the documents, chosen by (key, epoch). Only
    tests pass keyword arguments."""

    def __init__(
        self,
        blocks: DocumentBlocks,
        key: int,
        *,
        threshold: int = THRESHOLD,
        group: int = GROUP_DOCUMENTS,
    ) -> None:
        self._documents = blocks.documents
        count = self._documents.num_blocks
        # With as many runs as documents, each run is one document
        self._shuffled = BlockOrder(
            self._documents, key, threshold=threshold, groups=-(-count // group), runs=count
        )
        self._in_place = SequentialOrder(blocks, key)
        self.memory_bytes = self._shuffled.memory_bytes + self._in_place.memory_bytes

    def precompute(self) -> None:
        """Store the groups' token totals with the index, if there are groups. Raises CacheError."""
        self._shuffled.precompute()

    def spans(self, starts: Int64s, length: int | Int64s) -> Spans:
        """Locate ranges of `length` tokens, given their starts (int64 [n]); see Order.spans."""
        in_documents = self._shuffled.spans(starts, length)
        before = self._documents.before(in_documents.blocks)
        spans = self._in_place.cut(before + in_documents.starts, before + in_documents.stops)
        return spans._replace(
            rows=in_documents.rows[spans.rows], epochs=in_documents.epochs[spans.rows]
        )

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Return the positions at which an epoch reads stored tokens; see Order.find_tokens."""
        return self._shuffled.find_tokens(epoch, starts, stops)
