"""The block order: blocks in a new random order every epoch; each block is read once per epoch,
from its start to its end.

With up to THRESHOLD blocks, an epoch is one exact shuffle of the blocks, computed with cumulative
token counts when the epoch begins. Larger sources are shuffled at two levels, so that memory and
time stay bounded, for one source of 10^8 blocks as well as for a hundred sources of 10^6: blocks
are assigned to GROUPS groups, whose token totals are stored with the index; the groups are shuffled
when an epoch begins, and a group's blocks when the group begins. Neighbours on disk belong to
different groups, so that each group is spread over the whole source. Beyond GROUPS * RUNS blocks,
runs of neighbouring blocks are assigned together, so that a group consists of about RUNS runs and
needs as many index lookups, however large the source is. GROUPS is a prime, so no group consists of
the blocks at one position of every file or row group. THRESHOLD, GROUPS and RUNS are part of the
order: other values give another sequence of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from megablend.arrays import Int64s, running_totals
from megablend.kernels.blend.bijection import shuffle
from megablend.kernels.blend.keyed_hash import MASK
from megablend.lru import LRUCache
from megablend.order.base import Blocks, Placed, by_value
from megablend.order.listed import ListedOrder, Listing, Stretch
from megablend.order.sequential import SequentialOrder

THRESHOLD = 1 << 16
"""Maximum number of blocks that are shuffled at one level."""
GROUPS = 1021
"""Number of groups of a larger source."""
RUNS = 1 << 11
"""Approximate number of runs of neighbouring blocks in a group of the largest sources."""
_CACHED = 2
"""Number of epochs, and of groups, whose shuffles are cached: a cycle may mix the end of an epoch
or group with the start of the next one."""


class BlockOrder(ListedOrder):
    """An order in which every epoch is a permutation of the blocks, chosen by (key, epoch). `key`
    is a digest of the run's seed, the split and the source's name (`SplitSources.blocks`). Only
    tests pass keyword arguments."""

    def __init__(
        self,
        blocks: Blocks,
        key: int,
        *,
        threshold: int = THRESHOLD,
        groups: int = GROUPS,
        runs: int = RUNS,
    ) -> None:
        self._blocks = blocks
        self._key = key & MASK
        self._num_groups = groups if blocks.num_blocks > threshold else 1
        self._run = max(1, blocks.num_blocks // (groups * runs))
        self._group_totals: Int64s | None = None
        self._group_cache = LRUCache[Listing](_CACHED)
        self._member_cache = LRUCache[Listing](_CACHED)
        entries = self._num_groups + blocks.num_blocks // self._num_groups + self._run
        self.memory_bytes = _CACHED * entries * (8 + np.min_scalar_type(blocks.num_blocks).itemsize)

    def precompute(self) -> None:
        """Store the groups' token totals with the index, if there are groups. Raises CacheError."""
        if self._num_groups > 1:
            self._blocks.keep_group_totals(self._num_groups, self._run)

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Return the positions at which an epoch reads stored tokens; see Order.find_tokens."""
        spans = SequentialOrder(self._blocks, self._key).cut(starts, stops)
        block_starts = np.empty(len(spans.blocks), np.int64)  # positions within the epoch
        group_starts = _starts_of(self._shuffled_groups(epoch))
        for group, indices in by_value(spans.blocks // self._run % self._num_groups):
            member_starts = _starts_of(self._shuffled_members(epoch, group))
            indices_in_group = np.searchsorted(self._list_members(group), spans.blocks[indices])
            block_starts[indices] = group_starts[group] + member_starts[indices_in_group]
        block_starts += epoch * self._blocks.num_tokens
        stored = self._blocks.before(spans.blocks) + spans.starts
        return Placed(spans.rows, stored, block_starts + spans.starts, block_starts + spans.stops)

    def stretches(
        self, starts: Int64s, low: int, high: int
    ) -> Iterator[tuple[Int64s | slice, Stretch]]:
        """Yield the groups that contain positions (`starts`: int64 [n]), or the whole epoch if
        there is only one group; see ListedOrder.stretches."""
        for epoch, inside in self._by_epoch(starts, low, high):
            first = epoch * self._blocks.num_tokens
            if self._num_groups == 1:
                yield inside, (epoch, first, self._shuffled_members(epoch, 0))
                continue
            groups = self._shuffled_groups(epoch)
            positions = np.searchsorted(groups.offsets, starts[inside] - first, side="right") - 1
            for position, in_group in by_value(positions):
                members = self._shuffled_members(epoch, int(groups.entries[position]))
                begin = first + int(groups.offsets[position])
                yield np.arange(len(starts))[inside][in_group], (epoch, begin, members)

    def _shuffled_groups(self, epoch: int) -> Listing:
        """Return the groups in the order in which an epoch reads them."""
        return self._group_cache.get(
            epoch,
            lambda: _shuffle(np.arange(self._num_groups), self._totals(), self._key, epoch, 0),
        )

    def _shuffled_members(self, epoch: int, group: int) -> Listing:
        """Return the blocks of a group in the order in which an epoch reads them."""
        cached = self._member_cache.find((epoch, group))
        if cached is not None:
            return cached
        if self._num_groups == 1:
            members = np.arange(self._blocks.num_blocks)
            tokens = np.diff(self._blocks.before(np.arange(len(members) + 1)))
        else:
            members = self._list_members(group)
            tokens = self._blocks.before(members + 1) - self._blocks.before(members)
        shuffle_members = partial(_shuffle, members, tokens, self._key, epoch, group + 1)
        return self._member_cache.get((epoch, group), shuffle_members)

    def _list_members(self, group: int) -> Int64s:
        """Return the blocks of a group, in ascending order (int64 [n])."""
        num_blocks = self._blocks.num_blocks
        run = self._run
        starts = np.arange(group * run, num_blocks, self._num_groups * run)
        members = (starts[:, np.newaxis] + np.arange(run)).reshape(-1)  # [runs, blocks per run]
        return members[members < num_blocks]

    def _totals(self) -> Int64s:
        """Return the number of tokens of each group (int64 [num_groups])."""
        if self._num_groups == 1:
            return np.array([self._blocks.num_tokens], np.int64)
        if self._group_totals is None:
            self._group_totals = self._blocks.group_totals(self._num_groups, self._run)
        return self._group_totals


def _starts_of(shuffled: Listing) -> Int64s:
    """Return the number of tokens before each item in the shuffled order, sorted by item (int64
    [n])."""
    starts: Int64s = shuffled.offsets[:-1][np.argsort(shuffled.entries, kind="stable")]
    return starts


def _shuffle(items: Int64s, tokens: Int64s, key: int, epoch: int, group: int) -> Listing:
    """Shuffle items. Equal `key`, `epoch` and `group` give the same random order.

    Args:
        items: int64 [n], ascending.
        tokens: int64 [n], number of tokens of each item.
    """
    order = np.arange(len(items))
    shuffle(order, key, epoch, group)
    entries = items[order].astype(np.min_scalar_type(items[-1] if len(items) else 0))
    return Listing.of(entries, running_totals(tokens[order]))
