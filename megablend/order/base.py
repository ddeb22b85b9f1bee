"""The interface of orders, which map positions in a source's endless concatenation of epochs to
tokens of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s


class Blocks(Protocol):
    """The token counts of a source's blocks, which are numbered from 0; blocks may be empty."""

    num_blocks: int
    num_tokens: int
    """Tokens per epoch, above 0."""

    def before(self, blocks: Int64s) -> Int64s:
        """Return the number of tokens before each block.

        Args:
            blocks: int64 [n], block numbers from 0 to num_blocks inclusive.

        Returns: int64 [n].
        """
        ...

    def group_totals(self, num_groups: int, run: int) -> Int64s:
        """Return the number of tokens of each group of blocks (int64 [num_groups]). Blocks are
        assigned to groups in runs of `run` neighbours: block b belongs to group b // run %
        num_groups."""
        ...

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        """Store the result of `group_totals` in the cache, so that every process finds it there.
        Raises CacheError."""
        ...


class DocumentBlocks(Blocks, Protocol):
    """Blocks with a table of their documents."""

    @property
    def documents(self) -> Blocks:
        """The documents of the blocks, in the same order, each as if it were a block.

        Raises: CacheError if the index has no table of documents.
        """
        ...


class Spans(NamedTuple):
    """Ranges of a source's tokens, split at block boundaries into spans that are not empty. The
    fields are arrays of int64 [m]."""

    rows: Int64s
    """Number of the range that the span belongs to; ascending, and the spans of a range are in the
    order in which they are read."""
    epochs: Int64s
    """Number of the epoch that the span is in."""
    blocks: Int64s
    """Number of the block that contains the span."""
    starts: Int64s
    """First token of the span, counted within the block."""
    stops: Int64s
    """The token after the span's last one, counted within the block."""


class Placed(NamedTuple):
    """The positions at which an epoch reads ranges of a source's stored tokens. The ranges are
    split into parts that are not empty. The fields are arrays of int64 [m].

    Stored tokens are counted from the source's first block on, in file order.
    """

    rows: Int64s
    """Index of the requested range; ascending."""
    stored: Int64s
    """First stored token of this part of the range."""
    starts: Int64s
    """Position of that token in the endless concatenation of epochs."""
    stops: Int64s
    """The position after the part's last token."""


class Order(Protocol):
    """An order in which a source's tokens are read. It can be shared between threads and
    pickled."""

    memory_bytes: int
    """Upper bound of the memory that the order uses, in bytes (an estimate)."""

    def precompute(self) -> None:
        """Compute the results that would be slow to compute when a run is opened, and store them
        with the index. `build` calls this. Raises CacheError."""
        ...

    def spans(self, starts: Int64s, length: int | Int64s) -> Spans:
        """Locate ranges of `length` tokens of the endless concatenation of the source's epochs.

        Args:
            starts: int64 [n], first token of each range, 0 or more, in any order; start + length <
                2^63.
            length: one number for all ranges, or int64 [n]; 1 or more.
        """
        ...

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Return the positions at which an epoch reads ranges of stored tokens. This is the inverse
        of `spans`.

        Args:
            starts, stops: int64 [n], the ranges [start, stop), which must not be empty.
        """
        ...


def find_blocks(blocks: Blocks, tokens: Int64s) -> Int64s:
    """Return the block that contains each token of an epoch in file order (`tokens` and result:
    int64 [n])."""
    low = np.zeros(len(tokens), np.int64)
    high = np.full(len(tokens), blocks.num_blocks)
    # Binary search. Results that are final do not change, since the middle of their interval is
    # `low`
    while (high - low > 1).any():
        middle = (low + high) // 2
        left = blocks.before(middle) <= tokens
        low = np.where(left, middle, low)
        high = np.where(left, high, middle)
    return low


def join_spans(parts: Sequence[Spans]) -> Spans:
    """Join the spans of several passes. Each pass continues the ranges of the previous pass."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = np.zeros(0, np.int64)
        return Spans(empty, empty, empty, empty, empty)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Spans(*(column[order] for column in columns))


def by_value(values: npt.NDArray[Any]) -> Iterator[tuple[int, Int64s]]:
    """Yield each distinct value of an integer array, in ascending order, and the indices at which
    it occurs (`values`: [n]; indices: int64 [m], ascending)."""
    if not len(values):
        return
    if len(values) == 1 or (values == values[0]).all():  # the common cases
        yield int(values[0]), np.arange(len(values))
        return
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order])) + 1
    for first, stop in pairwise([0, *edges.tolist(), len(order)]):
        yield int(values[order[first]]), order[first:stop]
