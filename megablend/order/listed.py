"""Orders that list the blocks of an epoch as it reads them, and the location of ranges by these
lists: of any number of sources by one call of a kernel, since a call costs more than its work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.kernels.blend.spans import STRETCH_DTYPE, cut
from megablend.order.base import Blocks, Spans, by_value, join_spans


class Listing(NamedTuple):
    """Blocks, or other items with tokens, in the order in which they are read."""

    entries: npt.NDArray[Any]
    """[n], the number of the i-th."""
    offsets: Int64s
    """int64 [n + 1], tokens before the i-th."""
    columns: tuple[int, ...]
    """As kernels see both: `tokens` to `entry_bytes` of STRETCH_DTYPE."""

    @staticmethod
    def of(entries: npt.NDArray[Any], offsets: Int64s) -> Listing:
        """The listing of these items."""
        addresses = offsets.ctypes.data, entries.ctypes.data
        columns = int(offsets[-1]), len(entries), *addresses, entries.itemsize
        return Listing(entries, offsets, columns)


Stretch: TypeAlias = tuple[int, int, Listing]
"""What one listing describes of an epoch: the epoch, the position of its first token, the
listing."""


class ListedOrder(ABC):
    """An order whose epochs consist of stretches."""

    _blocks: Blocks

    @property
    def has_stretches(self) -> bool:
        """Whether they say where tokens are: a class that derives from ours may have other spans."""
        return type(self).spans is ListedOrder.spans

    @abstractmethod
    def stretches(
        self, starts: Int64s, low: int, high: int
    ) -> Iterator[tuple[Int64s | slice, Stretch]]:
        """The stretches that contain tokens at positions `starts` int64 [n], of which `low` and
        `high` are the least and the greatest; each with the indices of those that it contains."""

    def spans(self, starts: Int64s, length: int | Int64s) -> Spans:
        """Locate ranges of `length` tokens from each of `starts` int64 [n]; see Order.spans."""
        numbers = np.zeros(len(starts), np.int64)
        return locate_ranges([ListedSource(self)], numbers, starts, starts + length)

    def _by_epoch(
        self, starts: Int64s, low: int, high: int
    ) -> Iterator[tuple[int, Int64s | slice]]:
        """The epochs that contain `starts`, and the indices of those in each."""
        tokens = self._blocks.num_tokens
        if low // tokens == high // tokens:  # as mostly
            yield low // tokens, slice(None)
        else:
            yield from by_value(starts // tokens)


_NONE = np.empty((5, 0), np.int64)


class ListedSource(NamedTuple):
    """A source of which ranges are located."""

    order: ListedOrder
    shift: int = 0
    """Added to positions, see `Reading.shift`."""
    first_block: int = 0
    """Number that its first block has."""
    skip: int = 0
    """Tokens of this block before the first one that the order counts."""


def locate_ranges(
    sources: Sequence[ListedSource], numbers: Int64s, starts: Int64s, stops: Int64s
) -> Spans:
    """Locate ranges of tokens of several sources.

    Args:
        numbers: int64 [n], the source of each range: an index into `sources`.
        starts, stops: int64 [n], positions in the source's endless concatenation of epochs.
    """
    parts = list[Spans]()
    if any(each.shift for each in sources):
        shifts = np.array([each.shift for each in sources])[numbers]
        starts = starts + shifts
        stops = stops + shifts
    rows = np.arange(len(starts))
    while len(left := (starts < stops).nonzero()[0]):
        if len(left) < len(starts):
            rows = rows[left]
            numbers = numbers[left]
            starts = starts[left]
            stops = stops[left]
        table, places, _listings = _find_stretches(sources, numbers, starts)
        cuts = np.empty((5, cut(table, places, starts, stops, _NONE)), np.int64)
        cut(table, places, starts, stops, cuts)
        parts.append(Spans(rows[cuts[0]], *cuts[1:]))
        starts = (table["first"] + table["tokens"])[places]
    return join_spans(parts)


def _find_stretches(
    sources: Sequence[ListedSource], numbers: Int64s, starts: Int64s
) -> tuple[npt.NDArray[np.void], Int64s, list[Listing]]:
    """The stretches that contain `starts`, the one of each, and what keeps their memory."""
    rows = list[tuple[int, ...]]()
    listings = list[Listing]()
    found = np.empty(len(starts), np.int64)
    order: Int64s | slice = slice(None)
    by_source = starts
    each_source: Iterable[tuple[tuple[int, int], int, int, int]]
    if len(sources) == 1:  # often of a single sample
        each_source = [((0, len(starts)), 0, int(starts.min()), int(starts.max()))]
    else:
        order = np.argsort(numbers, kind="stable")
        by_source = starts[order]
        firsts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        each_source = zip(
            pairwise([*firsts.tolist(), len(starts)]),
            numbers[order[firsts]].tolist(),
            np.minimum.reduceat(by_source, firsts).tolist(),
            np.maximum.reduceat(by_source, firsts).tolist(),
            strict=True,
        )
    for (begin, end), number, low, high in each_source:
        listed, _, *place = sources[number]
        for inside, (epoch, first, listing) in listed.stretches(by_source[begin:end], low, high):
            found[begin:end][inside] = len(rows)
            rows.append((epoch, first, *listing.columns, *place))
            listings.append(listing)
    places = np.empty(len(starts), np.int64)
    places[order] = found
    return np.array(rows, STRETCH_DTYPE), places, listings
