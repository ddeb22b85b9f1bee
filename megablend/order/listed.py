"""Orders that list the blocks of an epoch in the order in which they are read. `locate_ranges` uses
these lists to locate ranges of tokens. One call handles any number of sources, since calling a
kernel costs more than the work that it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.kernels.blend.spans import STRETCH_DTYPE, cut
from megablend.order.base import Blocks, Spans, by_value, join_spans


class Listing(NamedTuple):
    """Blocks, or other items with tokens, in the order in which they are read."""

    entries: npt.NDArray[Any]
    """Numbers of the items: [n], of any integer type."""
    offsets: Int64s
    """Number of tokens before each item, and the total: int64 [n + 1]."""
    columns: tuple[int, ...]
    """The fields of STRETCH_DTYPE from `tokens` to `entry_bytes`. They describe the two arrays to
    kernels."""

    @staticmethod
    def of(entries: npt.NDArray[Any], offsets: Int64s) -> Listing:
        """Make a listing of `entries`, of which item i has the tokens from `offsets[i]` to `offsets[i + 1]`."""
        columns = (
            int(offsets[-1]),
            len(entries),
            offsets.ctypes.data,
            entries.ctypes.data,
            entries.itemsize,
        )
        return Listing(entries, offsets, columns)

    def __reduce__(self) -> tuple[Callable[..., Listing], tuple[npt.NDArray[Any], Int64s]]:
        # The arrays have other addresses in a worker that is not forked
        return Listing.of, (self.entries, self.offsets)


Stretch: TypeAlias = tuple[int, int, Listing]
"""The part of an epoch that one listing describes: the epoch, the position of the part's first
token, and the listing."""


class ListedOrder(ABC):
    """An order whose epochs are divided into parts, called stretches. The listing of each stretch
    says in which order blocks are read."""

    _blocks: Blocks

    @property
    def has_stretches(self) -> bool:
        """Whether the order's spans can be derived from its stretches. They cannot if a subclass of
        an order overrides `spans`."""
        return type(self).spans is ListedOrder.spans

    @abstractmethod
    def stretches(
        self, starts: Int64s, low: int, high: int
    ) -> Iterator[tuple[Int64s | slice, Stretch]]:
        """Yield the stretches that contain positions, each with the indices of the positions in it.

        Args:
            starts: int64 [n], positions in the endless concatenation of epochs.
            low, high: the smallest and the largest of them.
        """

    def spans(self, starts: Int64s, length: int | Int64s) -> Spans:
        """Locate ranges of `length` tokens, given their starts (int64 [n]); see Order.spans."""
        numbers = np.zeros(len(starts), np.int64)
        return locate_ranges([ListedSource(self)], numbers, starts, starts + length)

    def _by_epoch(
        self, starts: Int64s, low: int, high: int
    ) -> Iterator[tuple[int, Int64s | slice]]:
        """Yield the epochs that contain positions, each with the indices of the positions in it
        (`starts`: int64 [n])."""
        tokens = self._blocks.num_tokens
        if low // tokens == high // tokens:  # the common case
            yield low // tokens, slice(None)
        else:
            yield from by_value(starts // tokens)


_NO_OUTPUT = np.empty((5, 0), np.int64)
"""An output array without room for spans. If `cut` gets this array, it only counts the spans."""


class ListedSource(NamedTuple):
    """A source for `locate_ranges`, with its order."""

    order: ListedOrder
    shift: int = 0
    """The number to add to positions; see `Reading.shift`."""
    first_block: int = 0
    """Number of the source's first block."""
    skip: int = 0
    """Number of tokens at the start of the first block that the order does not count."""


def locate_ranges(
    sources: Sequence[ListedSource], numbers: Int64s, starts: Int64s, stops: Int64s
) -> Spans:
    """Locate ranges of tokens in several sources.

    Args:
        numbers: int64 [n], the source of each range, as an index into `sources`.
        starts, stops: int64 [n], positions in the source's endless concatenation of epochs.

    Returns: spans whose `rows` are indices of the ranges.
    """
    parts = list[Spans]()
    if any(map(attrgetter("shift"), sources)):
        shifts = np.array([source.shift for source in sources])[numbers]
        starts = starts + shifts
        stops = stops + shifts
    ranges = np.arange(len(starts))
    while True:
        unfinished = (starts < stops).nonzero()[0]
        if len(unfinished) == 0:
            return join_spans(parts)
        if len(unfinished) < len(starts):
            ranges = ranges[unfinished]
            numbers = numbers[unfinished]
            starts = starts[unfinished]
            stops = stops[unfinished]
        # The listings must live until `cut` has read their arrays
        table, rows, _listings = _find_stretches(sources, numbers, starts)
        num_spans = cut(table, rows, starts, stops, _NO_OUTPUT)
        cuts = np.empty((5, num_spans), np.int64)
        cut(table, rows, starts, stops, cuts)
        parts.append(Spans(ranges[cuts[0]], *cuts[1:]))
        # The rest of a range begins where its stretch ends
        starts = (table["first"] + table["tokens"])[rows]


def _find_stretches(
    sources: Sequence[ListedSource], numbers: Int64s, starts: Int64s
) -> tuple[npt.NDArray[np.void], Int64s, list[Listing]]:
    """Find the stretches that contain positions.

    Args:
        numbers: int64 [n], the source of each position, as an index into `sources`.
        starts: int64 [n], the positions.

    Returns: a table of stretches, STRETCH_DTYPE [m]; the row of each position's stretch in this
        table, int64 [n]; and the stretches' listings, which own the memory that the table points
        to.
    """
    table = list[tuple[int, ...]]()
    listings = list[Listing]()
    # Positions are looked up source by source
    by_source, groups = _group_by_source(len(sources), numbers, starts)
    sorted_starts = starts[by_source]
    sorted_rows = np.empty(len(starts), np.int64)
    for number, begin, end, low, high in groups:
        order, _, *first_block_and_skip = sources[number]
        group_rows = sorted_rows[begin:end]
        for indices, stretch in order.stretches(sorted_starts[begin:end], low, high):
            epoch, first, listing = stretch
            group_rows[indices] = len(table)
            table.append((epoch, first, *listing.columns, *first_block_and_skip))
            listings.append(listing)
    rows = np.empty(len(starts), np.int64)
    rows[by_source] = sorted_rows
    return np.array(table, STRETCH_DTYPE), rows, listings


def _group_by_source(
    num_sources: int, numbers: Int64s, starts: Int64s
) -> tuple[Int64s | slice, Iterable[tuple[int, int, int, int, int]]]:
    """Group positions by source (`numbers` and `starts`: int64 [n]).

    Returns: the indices that sort the positions by source; and for each group the number of its
        source, its start and stop among the sorted positions, its smallest and its largest
        position.
    """
    if num_sources == 1:  # the common case; often there is a single sample
        return slice(None), [(0, 0, len(starts), int(starts.min()), int(starts.max()))]
    by_source = np.argsort(numbers, kind="stable")
    sorted_starts = starts[by_source]
    begins = np.flatnonzero(np.diff(numbers[by_source], prepend=-1))
    groups = zip(
        numbers[by_source[begins]].tolist(),
        begins.tolist(),
        [*begins[1:].tolist(), len(starts)],
        np.minimum.reduceat(sorted_starts, begins).tolist(),
        np.maximum.reduceat(sorted_starts, begins).tolist(),
        strict=True,
    )
    return by_source, groups
