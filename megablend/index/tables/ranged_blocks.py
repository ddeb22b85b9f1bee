"""Blocks or documents in one or more ranges of the index, as orders see them, and the token totals
of groups of blocks.

Block b belongs to group b // run % num_groups. For a large source, an order needs the totals of all
groups before the first sample, so a build stores the totals, 8 bytes per group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megablend.arrays import Int64s, running_totals
from megablend.index.tables.sealed_numbers import ComputedNumbers

VERSION = 1


def count_groups(
    before: Callable[[Int64s], Int64s],
    num_blocks: int,
    num_groups: int,
    run: int,
    *,
    blocks_per_pass: int = 1 << 20,
) -> Int64s:
    """Count the tokens of each group.

    Args:
        before: a function that returns the number of tokens before each of the given blocks (both
            int64 [n]).
        run: number of neighbouring blocks that belong to the same group.

    Returns: int64 [num_groups].
    """
    totals = np.zeros(num_groups, np.int64)
    round_blocks = num_groups * run
    step = max(1, blocks_per_pass // round_blocks) * round_blocks
    for start in range(0, num_blocks, step):
        edges = np.arange(start, min(start + step, num_blocks) + run, run).clip(max=num_blocks)
        tokens = np.diff(before(edges))  # tokens of each run; the last run may be short
        whole = len(tokens) // num_groups * num_groups
        totals += tokens[:whole].reshape(-1, num_groups).sum(axis=0)
        totals[: len(tokens) - whole] += tokens[whole:]
    return totals


class RangedBlocks(ABC):
    """Blocks in one or more ranges, numbered from 0. Documents are treated as if each were a block.

    Args:
        firsts: int64 [num_ranges], number of each range's first block in the index, or of its first
            document in the source.
        counts: int64 [num_ranges], number of blocks of each range.
        tokens: int64 [num_ranges], number of tokens of each range.

    Attributes:
        num_blocks, num_tokens: numbers of blocks and tokens of all ranges.
    """

    def __init__(self, firsts: Int64s, counts: Int64s, tokens: Int64s) -> None:
        self._firsts = firsts
        self._offsets = running_totals(counts)
        self._tokens_before = running_totals(tokens)
        self.num_blocks = int(self._offsets[-1])
        self.num_tokens = int(self._tokens_before[-1])

    @abstractmethod
    def before(self, blocks: Int64s) -> Int64s:
        """Return the number of tokens before each block (int64 [n]). Blocks are given by local
        numbers from 0 to num_blocks (int64 [n])."""

    def index_blocks(self, blocks: Int64s) -> Int64s:
        """Convert local numbers of blocks, from 0 to num_blocks - 1, to numbers in the index; for
        documents, to numbers in the source (both int64 [n])."""
        numbers: Int64s
        if len(self._firsts) == 1:
            numbers = blocks + self._firsts[0]
            return numbers
        ranges = self._find_ranges(blocks)
        numbers = self._firsts[ranges] + blocks - self._offsets[ranges]
        return numbers

    def local_blocks(self, numbers: Int64s) -> Int64s:
        """Convert numbers of blocks in the index to local numbers (int64, of the same shape). For a
        block that is in no range, return the number of the next block in a range."""
        ranges = np.maximum(np.searchsorted(self._firsts, numbers, side="right") - 1, 0)
        inside = np.maximum(numbers - self._firsts[ranges], 0)
        local: Int64s = np.minimum(self._offsets[ranges] + inside, self._offsets[ranges + 1])
        return local

    def group_totals(self, num_groups: int, run: int) -> Int64s:
        """Return the number of tokens of each group (int64 [num_groups]); see Blocks.group_totals.
        The totals are counted if they are not stored. Raises: CacheError."""
        totals = self._stored_totals(num_groups, run).find(np.dtype(np.int64), num_groups)
        return self._count_groups(num_groups, run) if totals is None else totals

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        """Store the result of `group_totals` in the cache. Raises: CacheError."""
        stored = self._stored_totals(num_groups, run)
        if stored.find(np.dtype(np.int64), num_groups) is None:
            stored.keep(self._count_groups(num_groups, run))

    def _find_ranges(self, blocks: Int64s) -> Int64s:
        """Return the number of the range that contains each block (int64 [n]). For num_blocks, this
        is the last range."""
        if len(self._firsts) == 1:
            return np.zeros(len(blocks), np.int64)
        ranges: Int64s = np.searchsorted(self._offsets, blocks, side="right") - 1
        return np.minimum(ranges, len(self._firsts) - 1)

    def _count_groups(self, num_groups: int, run: int) -> Int64s:
        return count_groups(self.before, self.num_blocks, num_groups, run)

    @abstractmethod
    def _stored_totals(self, num_groups: int, run: int) -> ComputedNumbers:
        """Return the file that stores the totals of groups."""


def store_totals(cache: Path, owner: str, parts: Sequence[object]) -> ComputedNumbers:
    """Return a file in which to store the totals of groups.

    Args:
        owner: digest of the snapshot, or of the table of documents.
        parts: everything else that the totals depend on.
    """
    return ComputedNumbers(cache, owner, ["totals", VERSION, [owner, *parts]])
