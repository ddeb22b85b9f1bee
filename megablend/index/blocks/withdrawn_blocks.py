"""Blocks of which some are withdrawn: they count as empty,
so that an order arranges the others as it did before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from megablend.arrays import Int64s
from megablend.index.tables.ranged_blocks import count_groups
from megablend.order.base import Blocks, DocumentBlocks

B = TypeVar("B", bound=Blocks)


class RemainingUnits(Generic[B]):
    """Blocks, or documents, without those of some ranges.

    Args:
        units: all of them.
        ranges: int64 [n, 2], those that are withdrawn: ascending, without overlaps.
    """

    def __init__(self, units: B, ranges: Int64s) -> None:
        self._units = units
        self._firsts, self._stops = ranges.reshape(-1, 2).T
        edges = units.before(ranges.reshape(-1)).reshape(-1, 2)
        self._starts = edges[:, 0]
        self._gone = np.concatenate([[0], np.cumsum(edges[:, 1] - edges[:, 0])])
        self.num_blocks = units.num_blocks
        self.num_tokens = units.num_tokens - int(self._gone[-1])

    def before(self, blocks: Int64s) -> Int64s:
        """Tokens before each of `blocks` int64 [n], without those that are withdrawn: int64 [n]."""
        tokens = self._units.before(blocks)
        which = np.searchsorted(self._firsts, blocks, side="right") - 1
        inside = (which >= 0) & (blocks < self._stops[which])
        gone = self._gone[np.where(inside, which, which + 1)]
        found: Int64s = tokens - gone - np.where(inside, tokens - self._starts[which], 0)
        return found

    def remaining_before(self, token: int) -> int:
        """Tokens before token `token` of all units, without those that are withdrawn."""
        which = int(np.searchsorted(self._starts, token, side="right")) - 1
        if which < 0:
            return token
        gone = int(self._gone[which + 1] - self._gone[which])
        return token - int(self._gone[which]) - min(gone, token - int(self._starts[which]))

    def group_totals(self, num_groups: int, run: int) -> Int64s:
        """Tokens of each group, int64 [num_groups]; see Blocks.group_totals."""
        return count_groups(self.before, self.num_blocks, num_groups, run)

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        """Do nothing: what is left of an epoch is read once."""


class RemainingBlocks(RemainingUnits[DocumentBlocks]):
    """The blocks of a split without those of withdrawn files.

    Args:
        documents: the documents that are withdrawn, as ranges int64 [n, 2] of `blocks.documents`.
    """

    def __init__(
        self, blocks: DocumentBlocks, ranges: Int64s, documents: Callable[[], Int64s]
    ) -> None:
        super().__init__(blocks, ranges)
        self._find_documents = documents

    @property
    def documents(self) -> Blocks:
        """The documents of the blocks, each as if it were a block."""
        return RemainingUnits(self._units.documents, self._find_documents())
