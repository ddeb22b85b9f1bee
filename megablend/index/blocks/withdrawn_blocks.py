"""The blocks of a split after files were withdrawn. Blocks of withdrawn files count as empty, so
that an order arranges the other blocks as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from megablend.arrays import Int64s, running_totals
from megablend.index.tables.ranged_blocks import count_groups
from megablend.order.base import Blocks, DocumentBlocks

B = TypeVar("B", bound=Blocks)


class RemainingUnits(Generic[B]):
    """Blocks or documents of a split. Those that are withdrawn count as empty.

    Args:
        units: all blocks, or all documents.
        ranges: int64 [n, 2], ranges of withdrawn units: ascending, without overlaps.
    """

    def __init__(self, units: B, ranges: Int64s) -> None:
        self._units = units
        self._firsts, self._stops = ranges.reshape(-1, 2).T
        edges = units.before(ranges.reshape(-1)).reshape(-1, 2)
        self._starts = edges[:, 0]
        self._withdrawn_before = running_totals(edges[:, 1] - edges[:, 0])
        self.num_blocks = units.num_blocks
        self.num_tokens = units.num_tokens - int(self._withdrawn_before[-1])

    def before(self, blocks: Int64s) -> Int64s:
        """Return the number of tokens before each block, not counting withdrawn tokens (`blocks`
        and result: int64 [n])."""
        tokens = self._units.before(blocks)
        # The last withdrawn range that begins at or before each block; -1 if there is none
        ranges = np.searchsorted(self._firsts, blocks, side="right") - 1
        is_inside = (ranges >= 0) & (blocks < self._stops[ranges])
        in_earlier_ranges = self._withdrawn_before[np.where(is_inside, ranges, ranges + 1)]
        in_same_range = np.where(is_inside, tokens - self._starts[ranges], 0)
        remaining: Int64s = tokens - in_earlier_ranges - in_same_range
        return remaining

    def remaining_before(self, token: int) -> int:
        """Return how many tokens before a token are not withdrawn. The token is given by its
        position among the tokens of all units."""
        last = int(np.searchsorted(self._starts, token, side="right")) - 1
        if last < 0:
            return token
        withdrawn_before = int(self._withdrawn_before[last])
        in_last_range = int(self._withdrawn_before[last + 1]) - withdrawn_before
        return token - withdrawn_before - min(in_last_range, token - int(self._starts[last]))

    def group_totals(self, num_groups: int, run: int) -> Int64s:
        """Return the number of tokens of each group (int64 [num_groups]); see
        Blocks.group_totals."""
        return count_groups(self.before, self.num_blocks, num_groups, run)

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        """Do nothing: the rest of an epoch is read only once, so storing its totals would not pay
        off."""


class RemainingBlocks(RemainingUnits[DocumentBlocks]):
    """The blocks of a split in which blocks of withdrawn files count as empty.

    Args:
        documents: a function that returns the ranges of withdrawn documents, as numbers in
            `blocks.documents` (int64 [n, 2]).
    """

    def __init__(
        self, blocks: DocumentBlocks, ranges: Int64s, documents: Callable[[], Int64s]
    ) -> None:
        super().__init__(blocks, ranges)
        self._find_documents = documents

    @property
    def documents(self) -> Blocks:
        """The documents of the blocks, each represented as a block."""
        return RemainingUnits(self._units.documents, self._find_documents())
