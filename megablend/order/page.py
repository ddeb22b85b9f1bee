"""Blocks shuffled anew in every epoch, each read once and as a whole: the order that costs one read a page.

Up to THRESHOLD blocks an epoch is one exact shuffle of them, with running token counts, made on entering the epoch. Above, it has
two levels, so that memory and time stay flat: blocks are grouped by residue (block % GROUPS, so that neighbours on disk are
far apart), groups are shuffled on entering an epoch and a group's blocks on entering the group. THRESHOLD and GROUPS are part
of the order: another value gives another sequence of tokens.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.kernels.bijection import shuffle
from megablend.kernels.mixing import MASK
from megablend.order.base import Blocks, Span

THRESHOLD = 1 << 20
GROUPS = 1 << 10
_KEPT = 4
"""Epochs, and groups, whose shuffles are kept: a cycle may mix the end of one with the start of the next."""
_PASS = 1 << 22
"""Blocks whose sizes are read at once while the groups' totals are counted."""

Int64s = npt.NDArray[np.int64]


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
        self._epochs, self._entered = _Recent(), _Recent()

    def spans(self, start: int, stop: int) -> list[Span]:
        """Tokens [start, stop) of the endless concatenation of the source's epochs, in order."""
        spans = list[Span]()
        while start < stop:
            epoch, at = divmod(start, self._blocks.num_tokens)
            groups = self._groups(epoch)
            i = bisect_right(groups.offsets, at) - 1
            at -= int(groups.offsets[i])
            more = _cut(self._members(epoch, int(groups.entries[i])), epoch, at, at + stop - start)
            spans += more
            start += sum(span.stop - span.start for span in more)
        return spans

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


class _Recent:
    """The shuffles used last; pickled without them. Two threads may make the same one; they come out equal."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, Shuffled] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: Any, make: Callable[[], Shuffled]) -> Shuffled:
        with self._lock:
            if (found := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
                return found
        made = make()
        with self._lock:
            self._kept[name] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _Recent, ()


def _shuffled(things: Int64s, tokens: Int64s, key: int, epoch: int, group: int) -> Shuffled:
    """Things [n] with `tokens` [n] each, shuffled as (key, epoch, group) choose."""
    order = np.arange(len(things))
    shuffle(order, key, epoch, group)
    return Shuffled(things[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens[order])]))


def _cut(shuffled: Shuffled, epoch: int, start: int, stop: int) -> list[Span]:
    """Spans of tokens [start, stop), or up to the last block; 0 <= start < all tokens."""
    first = bisect_right(shuffled.offsets, start) - 1
    last = int(np.searchsorted(shuffled.offsets, stop))
    edges = shuffled.offsets[first : last + 1].tolist()
    blocks = shuffled.entries[first:last].tolist()
    return [
        Span(epoch, block, max(start - low, 0), min(stop, high) - low)
        for block, low, high in zip(blocks, edges[:-1], edges[1:], strict=True)
        if high > low
    ]
