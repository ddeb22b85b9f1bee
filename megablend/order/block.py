"""Blocks in a new random order every epoch, each read once and as a whole: the order that reads every block once.

Up to THRESHOLD blocks an epoch is one exact shuffle of them, with running token counts, made on entering the epoch. Above, it has
two levels, so that memory and time stay flat, for one source of 10^8 blocks and for a hundred of 10^6: blocks are dealt to GROUPS
groups, whose token totals are kept with the index; groups are shuffled on entering an epoch and a group's blocks on entering the
group. Neighbours on disk go to different groups, so that a group is spread over the whole source. Beyond GROUPS * RUNS blocks
they are dealt in runs of neighbours, so that a group consists of about RUNS runs, looked up in the index by as many touches,
however large the source is. GROUPS is a prime: no group gets the same place of every file or row group. THRESHOLD, GROUPS and
RUNS are part of the order: another value gives another sequence of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.kernels.plan.bijection import shuffle
from megablend.kernels.plan.keyed_hash import MASK
from megablend.kernels.plan.spans import count_cuts, cut
from megablend.lru import LRUCache
from megablend.order.base import Blocks, Int64s, Placed, Spans, by_value, join_spans
from megablend.order.sequential import SequentialOrder

THRESHOLD = 1 << 16
GROUPS = 1021
RUNS = 1 << 11
_KEPT = 2
"""Epochs, and groups, whose shuffles are kept: a cycle may mix the end of one with the start of the next."""


class Shuffled(NamedTuple):
    """Items with token counts, in a shuffled order."""

    entries: npt.NDArray[Any]
    """[n], which item comes i-th; of the narrowest type, since all of a large source are kept."""
    offsets: Int64s
    """int64 [n + 1], tokens before the i-th."""


class BlockOrder:
    """Every epoch is a permutation of the blocks, chosen by (key, epoch). Only tests change the keywords."""

    def __init__(
        self, blocks: Blocks, key: int, *, threshold: int = THRESHOLD, groups: int = GROUPS, runs: int = RUNS
    ) -> None:
        self._blocks, self._key = blocks, key & MASK
        self._num_groups = groups if blocks.num_blocks > threshold else 1
        self._run = max(1, blocks.num_blocks // (groups * runs))
        self._group_totals: Int64s | None = None
        self._epochs, self._entered = LRUCache[Shuffled](_KEPT), LRUCache[Shuffled](_KEPT)
        entries = self._num_groups + blocks.num_blocks // self._num_groups + self._run
        self.memory_bytes = _KEPT * entries * (8 + np.min_scalar_type(blocks.num_blocks).itemsize)

    def precompute(self) -> None:
        """Store the totals of the groups with the index, where there are groups. Raises CacheError."""
        if self._num_groups > 1:
            self._blocks.keep_group_totals(self._num_groups, self._run)

    def spans(self, starts: Int64s, length: int) -> Spans:
        """Stretches of `length` tokens from each of `starts` int64 [n]; see Order.spans."""
        found, rows, stops = list[Spans](), np.arange(len(starts)), starts + length
        while len(rows := rows[(left := starts < stops)]):
            starts, stops = starts[left].copy(), stops[left]
            for mine, epoch, first, shuffled in self._groups_containing(starts):
                ends = np.minimum(stops[mine] - first, shuffled.offsets[-1])
                found.append(_cut(shuffled, epoch, rows[mine], starts[mine] - first, ends))
                starts[mine] = first + ends
        return join_spans(found)

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Where stored tokens [starts, stops), int64 [n] each, come in an epoch; see Order.find_tokens."""
        found = SequentialOrder(self._blocks, self._key).cut(starts, stops)
        first = np.empty(len(found.blocks), np.int64)  # where each block begins in the epoch
        group_starts = _starts_of(self._groups(epoch))
        for group, mine in by_value(found.blocks // self._run % self._num_groups):
            members, inside = self._members(epoch, group), self._members_of(group)
            first[mine] = group_starts[group] + _starts_of(members)[np.searchsorted(inside, found.blocks[mine])]
        first += epoch * self._blocks.num_tokens
        stored = self._blocks.before(found.blocks) + found.starts
        return Placed(found.rows, stored, first + found.starts, first + found.stops)

    def _groups_containing(self, starts: Int64s) -> Iterator[tuple[Int64s, int, int, Shuffled]]:
        """The groups that contain tokens `starts`: which of the tokens, the epoch, the group's first token, its blocks."""
        for epoch, inside in by_value(starts // self._blocks.num_tokens):
            groups, first = self._groups(epoch), epoch * self._blocks.num_tokens
            places = np.searchsorted(groups.offsets, starts[inside] - first, side="right") - 1
            for place, mine in by_value(places):
                members = self._members(epoch, int(groups.entries[place]))
                yield inside[mine], epoch, first + int(groups.offsets[place]), members

    def _groups(self, epoch: int) -> Shuffled:
        return self._epochs.get(
            epoch, lambda: _shuffle(np.arange(self._num_groups), self._totals(), self._key, epoch, 0)
        )

    def _members(self, epoch: int, group: int) -> Shuffled:
        def enter() -> Shuffled:
            if self._num_groups == 1:
                members = np.arange(self._blocks.num_blocks)
                tokens = np.diff(self._blocks.before(np.arange(len(members) + 1)))
            else:
                members = self._members_of(group)
                tokens = self._blocks.before(members + 1) - self._blocks.before(members)
            return _shuffle(members, tokens, self._key, epoch, group + 1)

        return self._entered.get((epoch, group), enter)

    def _members_of(self, group: int) -> Int64s:
        """Blocks of a group, ascending: int64 [n]."""
        num_blocks, run = self._blocks.num_blocks, self._run
        starts = np.arange(group * run, num_blocks, self._num_groups * run)
        members = (starts[:, np.newaxis] + np.arange(run)).reshape(-1)  # (runs, blocks of a run)
        return members[members < num_blocks]

    def _totals(self) -> Int64s:
        """Tokens of each group: int64 [num_groups]."""
        if self._num_groups == 1:
            return np.array([self._blocks.num_tokens], np.int64)
        if self._group_totals is None:
            self._group_totals = self._blocks.group_totals(self._num_groups, self._run)
        return self._group_totals


def _starts_of(shuffled: Shuffled) -> Int64s:
    """Tokens before each of the items, in their ascending sequence: int64 [n]."""
    starts: Int64s = shuffled.offsets[:-1][np.argsort(shuffled.entries, kind="stable")]
    return starts


def _shuffle(items: Int64s, tokens: Int64s, key: int, epoch: int, group: int) -> Shuffled:
    """Items [n], ascending, of `tokens` [n] each, in the random order of (key, epoch, group)."""
    order = np.arange(len(items))
    shuffle(order, key, epoch, group)
    entries = items[order].astype(np.min_scalar_type(items[-1] if len(items) else 0))
    return Shuffled(entries, np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens[order])]))


def _cut(shuffled: Shuffled, epoch: int, rows: Int64s, starts: Int64s, stops: Int64s) -> Spans:
    """Spans of tokens [starts, stops) of the shuffled blocks, both int64 [n], of the stretches `rows` int64 [n]."""
    cuts = np.empty((4, count_cuts(shuffled.offsets, starts, stops)), np.int64)
    cut(shuffled.offsets, starts, stops, cuts)
    blocks = shuffled.entries[cuts[1]].astype(np.int64)
    return Spans(rows[cuts[0]], np.full(len(cuts[0]), epoch), blocks, cuts[2], cuts[3])
