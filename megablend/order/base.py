"""What an order is: it says where the tokens of a source's endless concatenation of epochs are in its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Blocks(Protocol):
    """A source's token counts, block by block, numbered from 0; some blocks may have none."""

    num_blocks: int
    num_tokens: int
    """Tokens of one epoch, above 0."""

    def before(self, blocks: Int64s) -> Int64s:
        """Tokens before each of `blocks` int64 [n], which are from 0 to num_blocks: int64 [n]."""
        ...

    def group_totals(self, num_groups: int, run: int) -> Int64s:
        """Tokens of each group, int64 [num_groups]; block b is of group b // run % num_groups."""
        ...

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        """Store what `group_totals` needs, so that it is fast from now on, in every process. Raises CacheError."""
        ...


class DocumentBlocks(Blocks, Protocol):
    """Blocks whose documents are known one by one."""

    @property
    def documents(self) -> Blocks:
        """The documents in the blocks, in the same order, each as if it were a block.

        Raises: CacheError where the index has no table of them.
        """
        ...


class Spans(NamedTuple):
    """Stretches of a source, divided at the edges of its blocks: int64 [m] each; no span is empty."""

    rows: Int64s
    """Number of the stretch; ascending, a stretch's spans in order."""
    epochs: Int64s
    blocks: Int64s
    starts: Int64s
    """First token within the block."""
    stops: Int64s


class Placed(NamedTuple):
    """Ranges of a source's stored tokens as an epoch has them: int64 [m] each; none is empty.

    Stored tokens are counted from the source's first block on, in the sequence of its blocks.
    """

    rows: Int64s
    """Number of the range that was looked for; ascending."""
    stored: Int64s
    """First of the stored tokens."""
    starts: Int64s
    """Where that one is in the endless concatenation of epochs."""
    stops: Int64s


class Order(Protocol):
    """Arranges a source's tokens for reading. Safe to share between threads, and to pickle."""

    memory_bytes: int
    """Upper estimate of what the order holds in memory."""

    def precompute(self) -> None:
        """Store with the index what would take long to compute when a run is opened. Called by `build`. Raises CacheError."""
        ...

    def spans(self, starts: Int64s, length: int) -> Spans:
        """Stretches of `length` tokens of the endless concatenation of the source's epochs.

        Args:
            starts: int64 [n], first tokens, 0 or more; in any order; start + length < 2^63.
        """
        ...

    def find_tokens(self, epoch: int, starts: Int64s, stops: Int64s) -> Placed:
        """Where stored tokens [starts, stops), int64 [n] each, none of them empty, come in an epoch: the inverse of `spans`."""
        ...


def join_spans(parts: Sequence[Spans]) -> Spans:
    """The spans of several passes, where each pass continued the stretches of the one before."""
    if len(parts) == 1:
        return parts[0]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [np.zeros(0, np.int64)] * 5
    order = np.argsort(columns[0], kind="stable")
    return Spans(*(column[order] for column in columns))


def by_value(values: npt.NDArray[Any]) -> Iterator[tuple[int, Int64s]]:
    """Each value that occurs, ascending, and where: int64 [...], ascending."""
    if len(values) and (values == values[0]).all():  # as mostly
        yield int(values[0]), np.arange(len(values))
        return
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order])) + 1
    for where in np.split(order, edges) if len(order) else ():
        yield int(values[where[0]]), where
