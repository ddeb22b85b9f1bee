"""Extra columns: columns with a value for each token of a source, such as loss weights.

An extra column has blocks of its own in the index. In a column of lists, each row has one value for
each of its tokens: the n-th token of a source has the column's n-th value. A flat column has one
value per row, for all tokens of the row. Either way, the values for a block of tokens are a
contiguous range of the column, which may begin and end within the column's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Bools, Int64s
from megablend.formats.base import STARTS_MID_DOCUMENT, Array, DecodedBlock
from megablend.formats.eod import with_eod
from megablend.index.blocks.extra_rows import ColumnBlocks, TokenBlocks, check_rows, find_first_rows
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.source_entry import ColumnEntry, SourceEntry

Read = Callable[[list[int]], Sequence[DecodedBlock]]
"""A function that reads and decodes blocks, given their numbers in the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraColumn:
    """An extra column of a source."""

    column: str
    """The column's name, as the config requests it."""
    entry: ColumnEntry
    """The column's entry in the index."""
    dtype: np.dtype[np.generic]
    flat: bool
    """Whether the column has one value per row. Otherwise each of its rows is a list with one value
    per token."""


class _NeededRanges(NamedTuple):
    """For each of n blocks of tokens, the range of an extra column's values to read."""

    starts: Int64s
    """Position of each range's first value in the column: int64 [n]."""
    counts: Int64s
    """Length of each range: int64 [n]."""
    has_previous: Bools
    """Whether each range begins one value before the values of the block's own tokens: bool [n].
    That value is needed if the last token of a document is in the previous block, and the
    document's end-of-document token is in this one."""


def read_extra_columns(
    snapshot: Snapshot,
    columns: Sequence[ExtraColumn],
    source: SourceEntry,
    read: Read,
    ids: Int64s,
    blocks: Sequence[DecodedBlock],
    *,
    has_eod: bool,
) -> list[tuple[Array, ...]]:
    """Read the columns' values for each token of blocks of their source.

    Args:
        source: the source that the blocks belong to.
        read: reads and decodes blocks of the index.
        ids: int64 [n], the blocks' numbers in the index.
        blocks: [n], the decoded blocks, without end-of-document tokens.
        has_eod: whether to insert a value for each end-of-document token: the value of the
            document's last token.

    Returns: for each block, one read-only array per column.
    Raises: CorruptFileError if a row has different numbers of tokens and values; the errors of
        `read`.
    """
    flags = snapshot.blocks(ids)["flags"]
    num_pieces = np.array([len(block.offsets) - 1 for block in blocks])
    num_tokens = np.array([len(block.tokens) for block in blocks])
    tokens = _locate_blocks(snapshot, source, ids, flags, num_pieces, num_tokens)
    by_column = []
    for column in columns:
        needed = _find_needed(column, tokens, has_eod=has_eod)
        column_blocks, numbers = _read_ranges(snapshot, column, read, needed)
        if not column.flat:
            check_rows(snapshot, source, column.entry, tokens, blocks, column_blocks)
        aligned = []
        for block, of_block, has_previous, flag in zip(
            blocks, numbers, needed.has_previous.tolist(), flags.tolist(), strict=True
        ):
            aligned.append(
                _align(block, of_block, has_previous, flag, flat=column.flat, has_eod=has_eod)
            )
        by_column.append(aligned)
    return list(zip(*by_column, strict=True))


def list_extra_blocks(
    snapshot: Snapshot,
    columns: Sequence[ExtraColumn],
    source: SourceEntry,
    ids: Int64s,
    *,
    has_eod: bool,
) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield, for each extra column, the column's blocks that `read_extra_columns` will read,
    according to the index.

    Yields: the numbers of the column's blocks, int64 [m]; and for each of them, the position in
        `ids` of the block of tokens that needs it, int64 [m].
    """
    blocks = snapshot.blocks(ids)
    flags = blocks["flags"]
    num_pieces = blocks["rows"] + ((flags & STARTS_MID_DOCUMENT) > 0)
    tokens = _locate_blocks(snapshot, source, ids, flags, num_pieces, blocks["tokens"])
    for column in columns:
        needed = _find_needed(column, tokens, has_eod=has_eod)
        _, firsts, stops = _find_blocks(snapshot, column, needed)
        sizes = stops - firsts
        needed_by = np.repeat(np.arange(len(ids)), sizes)
        # For each of `ids`: the number of a column's block that it needs, minus the block's index
        # in the result
        shifts = stops - np.cumsum(sizes)
        yield np.arange(len(needed_by)) + shifts[needed_by], needed_by


def _locate_blocks(
    snapshot: Snapshot,
    source: SourceEntry,
    ids: Int64s,
    flags: npt.NDArray[np.uint8],
    num_pieces: Int64s,
    num_tokens: Int64s,
) -> TokenBlocks:
    """Return the positions of blocks within the rows and the tokens of their source."""
    before = snapshot.running("tokens_before", np.append(ids, source.blocks.start))
    first_rows = find_first_rows(snapshot, source, ids, flags)
    return TokenBlocks(ids, first_rows, before[:-1] - before[-1], num_pieces, num_tokens)


def _find_needed(column: ExtraColumn, tokens: TokenBlocks, *, has_eod: bool) -> _NeededRanges:
    """Return the range of a column's values that each block of tokens needs."""
    if column.flat:
        has_previous = np.zeros(len(tokens.ids), np.bool_)
        return _NeededRanges(tokens.first_rows, tokens.num_pieces, has_previous)
    has_previous = (tokens.first_tokens > 0) & has_eod
    return _NeededRanges(
        tokens.first_tokens - has_previous, tokens.num_tokens + has_previous, has_previous
    )


def _read_ranges(
    snapshot: Snapshot, column: ExtraColumn, read: Read, needed: _NeededRanges
) -> tuple[ColumnBlocks, list[Array]]:
    """Read ranges of a column's values. Return the blocks of the column that were read, and an
    array of values for each range."""
    origin, firsts, stops = _find_blocks(snapshot, column, needed)
    bounds = list(zip(firsts.tolist(), stops.tolist(), strict=True))
    ids = sorted({i for first, stop in bounds for i in range(first, stop)})
    starts = snapshot.running("tokens_before", np.array(ids, np.int64)) - origin
    column_blocks = ColumnBlocks(np.array(ids, np.int64), starts, read(ids))
    by_id = dict(zip(ids, zip(starts.tolist(), column_blocks.blocks, strict=True), strict=True))
    ranges = []
    for start, count, (first, stop) in zip(
        needed.starts.tolist(), needed.counts.tolist(), bounds, strict=True
    ):
        parts = [np.zeros(0, column.dtype)]
        for i in range(first, stop):
            block_start, block = by_id[i]
            begin = start - block_start
            parts.append(block.tokens[max(0, begin) : begin + count])
        ranges.append(np.concatenate(parts))
    return column_blocks, ranges


def _find_blocks(
    snapshot: Snapshot, column: ExtraColumn, needed: _NeededRanges
) -> tuple[int, Int64s, Int64s]:
    """Find the blocks of a column that contain ranges of its values.

    Returns: the position of the column's first value among the values of all blocks of the index;
        for each range, its first block, int64 [n]; and the block after its last one, int64 [n].
    """
    span = column.entry.blocks
    origin = int(snapshot.running("tokens_before", [span.start])[0])
    firsts = np.full(len(needed.starts), span.start)
    stops = firsts.copy()
    filled = np.flatnonzero(needed.counts > 0)
    begins = origin + needed.starts[filled]
    lasts = begins + needed.counts[filled] - 1
    firsts[filled] = snapshot.find_blocks("tokens_before", span, begins)
    stops[filled] = snapshot.find_blocks("tokens_before", span, lasts) + 1
    return origin, firsts, stops


def _align(
    block: DecodedBlock,
    values: Array,
    has_previous: bool,
    flags: int,
    *,
    flat: bool,
    has_eod: bool,
) -> Array:
    """Return a column's value for each token of a block. If `has_eod`, this includes
    end-of-document tokens.

    Args:
        found: the column's values for the block: one per row if the column is flat, otherwise one
            per token. If `has_previous`, the value of the token before the block comes first.
        flags: the block's flags.
    """
    numbers = np.repeat(values, np.diff(block.offsets)) if flat else values[has_previous:]
    if has_eod:
        # The position of each token among the block's tokens, counted from 1; 0 if it was inserted
        positions = with_eod(
            DecodedBlock(np.arange(1, len(numbers) + 1), block.offsets), flags, 0
        ).tokens
        if len(positions) > len(numbers):
            # An inserted token gets the value of the last token before it
            last_positions = np.maximum.accumulate(positions)
            numbers = np.concatenate([values[:1], numbers])[last_positions]
    numbers.setflags(write=False)
    return numbers
