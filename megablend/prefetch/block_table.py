"""A table of decoded blocks from which kernels gather samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.formats.decoded import DTYPES, DecodedBlocks, address_of
from megablend.kernels.reader.gather import SLOT_DTYPE, gather_tokens, mark_documents
from megablend.order.base import Spans

_LIKE = [np.empty(0, dtype) for dtype in DTYPES]
"""An empty array of each token type. A kernel is compiled for each of these types."""
_NO_BLOCK = np.array((0, -1, 0, 0, 0), SLOT_DTYPE)
"""An empty slot. Its size is negative."""


class BlockTable:
    """A table of decoded blocks with one slot per block. Blocks are put into their slots, and
    dropped when they are no longer needed.

    Args:
        ids: int64 [num_blocks], block numbers in the index, ascending.
    """

    def __init__(self, ids: Int64s) -> None:
        self.ids = ids
        # For each slot: the object that owns the memory of its block's tokens, and the offsets of
        # its pieces
        self._owners: list[Any] = [None] * len(ids)
        self._offsets: list[Int64s | None] = [None] * len(ids)
        # The same data, as kernels see it
        self._slots = np.full(len(ids), _NO_BLOCK)
        self._counted_bytes = np.zeros(len(ids), np.int64)
        self._kinds_seen: set[int] = set()
        # For each extra column, its values, whose bits are stored as if they were tokens
        self._extra: list[BlockTable] = []

    def put(self, slots: Int64s, blocks: DecodedBlocks, sizes: Int64s) -> None:
        """Put blocks into the table.

        Args:
            slots: int64 [n], slots of the blocks.
            sizes: int64 [n], size of each block in bytes, as it is counted.
        """
        for slot, owner in zip(slots.tolist(), blocks.owners, strict=True):
            self._owners[slot] = owner
        self._kinds_seen.update(set(blocks.kinds.tolist()))
        self._slots["kind"][slots] = blocks.kinds
        self._slots["size"][slots] = blocks.sizes
        self._slots["tokens"][slots] = blocks.addresses
        self._counted_bytes[slots] = sizes
        if blocks.offsets is not None:
            for slot, offsets in zip(slots.tolist(), blocks.offsets, strict=True):
                self._offsets[slot] = offsets
            self._slots["offsets"][slots] = list(map(address_of, blocks.offsets))
            self._slots["num_offsets"][slots] = list(map(len, blocks.offsets))
        for column, numbers in enumerate(blocks.extra):
            if column == len(self._extra):
                self._extra.append(BlockTable(self.ids))
            self._extra[column].put(slots, numbers, np.zeros(len(slots), np.int64))

    def drop(self, slots: Int64s) -> int:
        """Drop the blocks in these slots. Return the sum of their sizes as given to `put`."""
        for slot in slots.tolist():
            self._owners[slot] = None
            self._offsets[slot] = None
        for table in self._extra:
            table.drop(slots)
        self._slots[slots] = _NO_BLOCK
        return sum(self._counted_bytes[slots].tolist())

    def occupied(self) -> Int64s:
        """Return the slots of the blocks that are in the table: int64 [...]."""
        return np.flatnonzero(self._slots["size"] >= 0)

    def move_to(self, ids: Int64s) -> BlockTable:
        """Return a new table, for other blocks, that contains all blocks of this table.

        Args:
            ids: int64 [n], block numbers of the new table, ascending; all blocks of this table are
                among them.
        """
        table = BlockTable(ids)
        occupied = self.occupied()
        slots = np.searchsorted(ids, self.ids[occupied])
        for old, new in zip(occupied.tolist(), slots.tolist(), strict=True):
            table._owners[new] = self._owners[old]
            table._offsets[new] = self._offsets[old]
        table._slots[slots] = self._slots[occupied]
        table._counted_bytes[slots] = self._counted_bytes[occupied]
        table._kinds_seen = self._kinds_seen
        table._extra = [column.move_to(ids) for column in self._extra]
        return table

    def gather(
        self, slots: Int64s, spans: Spans, width: int, tokens: Int64s, labels: Int64s
    ) -> None:
        """Copy the tokens of samples from the blocks.

        Args:
            slots: int64 [m], the table slot of each span's block.
            spans: the samples' spans [m].
            width: number of tokens per sample.
            tokens, labels: int64 [n, length], output arrays, filled up to `width`. `tokens` gets
                the tokens of the samples, `labels` the tokens from each sample's second one on.
        """
        # The kernel is compiled for each type of tokens, and skips blocks of other types
        for kind in self._kinds_seen:
            wrong = gather_tokens(
                _LIKE[kind],
                kind,
                self._slots,
                slots,
                spans.starts,
                spans.stops,
                width,
                tokens,
                labels,
            )
            assert wrong < 0, f"span {wrong} of {len(slots)} is outside its block or sample"

    def gather_extra(
        self,
        column: int,
        dtype: np.dtype[Any],
        slots: Int64s,
        spans: Spans,
        shape: tuple[int, int],
    ) -> npt.NDArray[Any]:
        """Return the values of an extra column for samples: [n, tokens per sample].

        Args:
            column: number of the extra column.
            dtype: dtype of the result.
            slots, spans: as in `gather`.
            shape: (number of samples, tokens per sample).
        """
        bits = np.zeros(shape, np.int64)
        unused = np.empty(shape, np.int64)
        self._extra[column].gather(slots, spans, shape[1], bits, unused)
        return bits.astype(f"i{dtype.itemsize}").view(dtype)

    def begins(
        self,
        slots: Int64s,
        spans: Spans,
        num_tokens: int,
        width: int,
        continues: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Return whether a document, or a sample, begins at each token.

        Args:
            slots, spans: as in `gather`.
            width: number of tokens per sample.
            continues: bool [num_blocks], whether a block's first piece continues the previous
                block's last document.

        Returns: bool [num_tokens].
        """
        out = np.zeros(num_tokens, np.bool_)
        wrong = mark_documents(
            self.ids,
            continues,
            self._slots,
            slots,
            spans.epochs,
            spans.starts,
            spans.stops,
            width,
            out,
        )
        assert wrong < 0, f"span {wrong} of {len(slots)} is outside its block"
        return out
