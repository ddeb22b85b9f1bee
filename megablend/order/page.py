"""Blocks shuffled anew in every epoch, each read once and as a whole: the order that costs one read a page.

Up to THRESHOLD blocks an epoch is one exact shuffle of them, with running token counts, made on entering the epoch. Above, it has
two levels, so that memory and time stay flat: blocks are grouped by residue (block % GROUPS, so that neighbours on disk are
far apart), groups are shuffled on entering an epoch and a group's blocks on entering the group. THRESHOLD and GROUPS are part
of the order: another value gives another sequence of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megablend.index.recent import Recent
from megablend.kernels.bijection import shuffle
from megablend.kernels.mixing import MASK
from megablend.kernels.spans import count_cuts, cut
from megablend.order.base import Blocks, Int64s, Spans, by_value, joined

THRESHOLD = 1 << 20
GROUPS = 1 << 10
_KEPT = 4
"""Epochs, and groups, whose shuffles are kept: a cycle may mix the end of one with the start of the next."""
_PASS = 1 << 22
"""Blocks whose sizes are read at once while the groups' totals are counted."""


class Shuffled(NamedTuple):
    """Things with token counts in a shuffled order."""

    entries: Int64s
    """int64 [n], which thing comes i-th."""
    offsets: Int64s
    """int64 [n + 1], tokens before the i-th."""


class PageOrder:
    """Every epoch a permutation of the blocks, chosen by (key, epoch). `threshold` and `groups` are changed by tests alone."""

    def __init__(self, blocks: Blocks, key: int, *, threshold: int = THRESHOLD, groups: int = GROUPS) -> None:
        self._blocks, self._key = blocks, key & MASK
        self._num_groups = groups if blocks.num_blocks > threshold else 1
        self._group_totals: Int64s | None = None
        self._epochs, self._entered = Recent[Shuffled](_KEPT), Recent[Shuffled](_KEPT)

    def spans(self, starts: Int64s, length: int) -> Spans:
        """Stretches of `length` tokens from each of `starts` int64 [n]; see Order.spans."""
        found, rows, stops = list[Spans](), np.arange(len(starts)), starts + length
        while len(rows := rows[(left := starts < stops)]):
            starts, stops = starts[left].copy(), stops[left]
            for mine, epoch, first, shuffled in self._entered_by(starts):
                ends = np.minimum(stops[mine] - first, shuffled.offsets[-1])
                found.append(_cut(shuffled, epoch, rows[mine], starts[mine] - first, ends))
                starts[mine] = first + ends
        return joined(found)

    def _entered_by(self, starts: Int64s) -> Iterator[tuple[Int64s, int, int, Shuffled]]:
        """The groups that tokens `starts` lie in: which of them, the epoch, the group's first token, its blocks."""
        for epoch, inside in by_value(starts // self._blocks.num_tokens):
            groups, first = self._groups(epoch), epoch * self._blocks.num_tokens
            places = np.searchsorted(groups.offsets, starts[inside] - first, side="right") - 1
            for place, mine in by_value(places):
                members = self._members(epoch, int(groups.entries[place]))
                yield inside[mine], epoch, first + int(groups.offsets[place]), members

    def _groups(self, epoch: int) -> Shuffled:
        return self._epochs.get(
            epoch, lambda: _shuffled(np.arange(self._num_groups), self._totals(), self._key, epoch, 0)
        )

    def _members(self, epoch: int, group: int) -> Shuffled:
        def enter() -> Shuffled:
            members = np.arange(group, self._blocks.num_blocks, self._num_groups)
            sizes = self._blocks.sizes(group, self._blocks.num_blocks, self._num_groups)
            return _shuffled(members, sizes, self._key, epoch, group + 1)

        return self._entered.get((epoch, group), enter)

    def _totals(self) -> Int64s:
        """Tokens of each group: int64 [num_groups]; read once."""
        blocks, num_groups = self._blocks, self._num_groups
        if num_groups == 1:
            return np.array([blocks.num_tokens], np.int64)
        if self._group_totals is None:
            totals = np.zeros(num_groups, np.int64)
            step = max(1, _PASS // num_groups) * num_groups
            for start in range(0, blocks.num_blocks, step):
                sizes = blocks.sizes(start, min(start + step, blocks.num_blocks))
                whole = len(sizes) // num_groups * num_groups
                totals += sizes[:whole].reshape(-1, num_groups).sum(axis=0)
                totals[: len(sizes) - whole] += sizes[whole:]
            self._group_totals = totals
        return self._group_totals


def _shuffled(things: Int64s, tokens: Int64s, key: int, epoch: int, group: int) -> Shuffled:
    """Things [n] with `tokens` [n] each, shuffled as (key, epoch, group) choose."""
    order = np.arange(len(things))
    shuffle(order, key, epoch, group)
    return Shuffled(things[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens[order])]))


def _cut(shuffled: Shuffled, epoch: int, rows: Int64s, starts: Int64s, stops: Int64s) -> Spans:
    """Spans of tokens [starts, stops) of the shuffled blocks, both int64 [n], of the stretches `rows` int64 [n]."""
    cuts = np.empty((4, count_cuts(shuffled.offsets, starts, stops)), np.int64)
    cut(shuffled.offsets, starts, stops, cuts)
    return Spans(rows[cuts[0]], np.full(len(cuts[0]), epoch), shuffled.entries[cuts[1]], cuts[2], cuts[3])
