"""Extra columns: a number for each token of a block.

An extra column of a source is indexed with its own blocks. A column of lists has as many numbers in
each row as there are tokens: the n-th token of a source has the column's n-th number. A flat column
has one number per row, for all tokens of the row. Either way the numbers of a block of tokens are a
contiguous range of the column, wherever its blocks begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CorruptFileError
from megablend.formats.base import STARTS_MID_DOCUMENT, Array, DecodedBlock
from megablend.formats.eod import with_eod
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.source_entry import ColumnEntry, SourceEntry

Read = Callable[[list[int]], list[DecodedBlock]]
"""Reads and decodes blocks, given their numbers in the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraColumn:
    """An extra column of a source."""

    column: str
    """The column's name, as the config requests it."""
    entry: ColumnEntry
    """The column's entry in the index."""
    dtype: np.dtype[np.generic]
    flat: bool
    """Whether the column has one value per row, not a list with one value per token."""


class _NeededRanges(NamedTuple):
    """The ranges of a column's numbers that n blocks of tokens need, one for each block."""

    starts: Int64s
    """Position among the column's numbers of the first number that belongs to each block: its first
    row if the column is flat, otherwise its first token: int64 [n]."""
    counts: Int64s
    """Number of numbers that belong to each block: int64 [n]."""
    has_previous: npt.NDArray[np.bool_]
    """Whether the number before the range is needed as well: bool [n]. A document may end in a
    block that has none of its tokens: the number of its last token is then the one before the
    block's first."""

    @property
    def read_starts(self) -> Int64s:
        """The first number that is read for each block: int64 [n]."""
        return self.starts - self.has_previous

    @property
    def read_counts(self) -> Int64s:
        """The number of numbers that are read for each block: int64 [n]."""
        return self.counts + self.has_previous


def read_extra_columns(
    snapshot: Snapshot,
    columns: Sequence[ExtraColumn],
    tokens: SourceEntry,
    read: Read,
    ids: Int64s,
    blocks: Sequence[DecodedBlock],
    *,
    has_eod: bool,
) -> list[tuple[Array, ...]]:
    """Read the columns' numbers for each token of some blocks of their source.

    Args:
        tokens: the source that the blocks belong to.
        read: reads and decodes blocks of the index.
        ids: int64 [n], the blocks' numbers in the index.
        blocks: [n], the decoded blocks, without end-of-document tokens.
        has_eod: whether to insert a number for each end-of-document token: the number of the
            document's last token.

    Returns: for each block, one array per column, read-only.
    Raises: CorruptFileError if rows of the two columns have different numbers of values; the errors
    of `read`.
    """
    flags = snapshot.blocks(ids)["flags"]
    first_rows = _first_rows(snapshot, tokens, ids, flags)
    num_pieces = np.array([len(block.offsets) - 1 for block in blocks])
    num_tokens = np.array([len(block.tokens) for block in blocks])
    by_column = []
    for column in columns:
        needed = _find_needed(
            snapshot, column, tokens, ids, first_rows, num_pieces, num_tokens, has_eod=has_eod
        )
        numbers, column_blocks = _fetch(
            snapshot, column, read, needed.read_starts, needed.read_counts
        )
        if not column.flat:
            _check_rows(
                snapshot, column, tokens, ids, first_rows, blocks, needed.starts, column_blocks
            )
        by_column.append(
            [
                _aligned(column, block, block_numbers, has_previous, block_flags, has_eod=has_eod)
                for block, block_numbers, has_previous, block_flags in zip(
                    blocks, numbers, needed.has_previous.tolist(), flags.tolist(), strict=True
                )
            ]
        )
    return list(zip(*by_column, strict=True))


def list_extra_blocks(
    snapshot: Snapshot,
    columns: Sequence[ExtraColumn],
    tokens: SourceEntry,
    ids: Int64s,
    *,
    has_eod: bool,
) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield the blocks that `read_extra_columns` will read, according to the index: for each column
    the numbers of its blocks that are needed, int64 [m], and for each of these blocks the position
    in `ids` of the block that needs it, int64 [m]."""
    blocks = snapshot.blocks(ids)
    first_rows = _first_rows(snapshot, tokens, ids, blocks["flags"])
    num_pieces = blocks["rows"] + ((blocks["flags"] & STARTS_MID_DOCUMENT) > 0)
    for column in columns:
        needed = _find_needed(
            snapshot, column, tokens, ids, first_rows, num_pieces, blocks["tokens"], has_eod=has_eod
        )
        _, firsts, stops = _find_blocks(snapshot, column, needed.read_starts, needed.read_counts)
        sizes = stops - firsts
        needed_by = np.repeat(np.arange(len(ids)), sizes)
        # Block number minus position in the result, for the blocks that each of `ids` needs
        shifts = stops - np.cumsum(sizes)
        yield np.arange(len(needed_by)) + shifts[needed_by], needed_by


def _find_needed(
    snapshot: Snapshot,
    column: ExtraColumn,
    tokens: SourceEntry,
    ids: Int64s,
    first_rows: Int64s,
    num_pieces: Int64s,
    num_tokens: Int64s,
    *,
    has_eod: bool,
) -> _NeededRanges:
    """Find the numbers of a column that blocks of its source need.

    Args:
        ids: int64 [n], the blocks.
        first_rows, num_pieces, num_tokens: int64 [n], row of each block's first piece, and its
            numbers of pieces and of tokens.
    """
    if column.flat:
        return _NeededRanges(first_rows, num_pieces, np.zeros(len(ids), np.bool_))
    before = snapshot.running("tokens_before", np.append(ids, tokens.blocks.start))
    first_tokens = before[:-1] - before[-1]
    return _NeededRanges(first_tokens, num_tokens, (first_tokens > 0) & has_eod)


def _aligned(
    column: ExtraColumn,
    block: DecodedBlock,
    found: Array,
    has_previous: bool,
    flags: int,
    *,
    has_eod: bool,
) -> Array:
    """Return a number for each token of a block, and with `has_eod` for each end-of-document token.

    Args:
        found: the column's numbers for the block: one per row if the column is flat, otherwise one
            per token; with `has_previous`, preceded by the number of the token before the block.
        flags: the block's flags.
    """
    numbers = np.repeat(found, np.diff(block.offsets)) if column.flat else found[has_previous:]
    if has_eod:
        # The position of each token among the block's tokens, counted from 1; 0 if it was inserted
        positions = with_eod(
            DecodedBlock(np.arange(1, len(numbers) + 1), block.offsets), flags, 0
        ).tokens
        if len(positions) > len(numbers):
            # An inserted token has the number of the last token before it
            last_positions = np.maximum.accumulate(positions)
            numbers = np.concatenate([found[:1], numbers])[last_positions]
    numbers.setflags(write=False)
    return numbers


def _fetch(
    snapshot: Snapshot, column: ExtraColumn, read: Read, starts: Int64s, counts: Int64s
) -> tuple[list[Array], dict[int, tuple[int, DecodedBlock]]]:
    """Read ranges of a column's numbers.

    Args:
        starts, counts: int64 [n], first number and length of each range.

    Returns: the numbers of each range, [n]; and by block number the column's blocks that were read,
        each with the count of the column's numbers before it.
    """
    origin, firsts, stops = _find_blocks(snapshot, column, starts, counts)
    bounds = list(zip(firsts.tolist(), stops.tolist(), strict=True))
    needed = sorted({i for first, stop in bounds for i in range(first, stop)})
    before = snapshot.running("tokens_before", np.array(needed, np.int64)) - origin
    decoded = dict(zip(needed, zip(before.tolist(), read(needed), strict=True), strict=True))
    ranges = []
    for start, size, (first, stop) in zip(starts.tolist(), counts.tolist(), bounds, strict=True):
        parts = [np.zeros(0, column.dtype)]
        for i in range(first, stop):
            num_before, block = decoded[i]
            begin = start - num_before
            parts.append(block.tokens[max(0, begin) : begin + size])
        ranges.append(np.concatenate(parts))
    return ranges, decoded


def _find_blocks(
    snapshot: Snapshot, column: ExtraColumn, starts: Int64s, counts: Int64s
) -> tuple[int, Int64s, Int64s]:
    """Return the position of a column's first number among all numbers of the index; and for each
    range of the column's numbers, the first block that contains some of them and the block after
    the last one, arrays of int64 [n]."""
    span = column.entry.blocks
    origin = int(snapshot.running("tokens_before", [span.start])[0])
    firsts = np.full(len(starts), span.start)
    stops = firsts.copy()
    filled = np.flatnonzero(counts > 0)
    begins = origin + starts[filled]
    firsts[filled] = snapshot.find_blocks("tokens_before", span, begins)
    stops[filled] = snapshot.find_blocks("tokens_before", span, begins + counts[filled] - 1) + 1
    return origin, firsts, stops


def _check_rows(
    snapshot: Snapshot,
    column: ExtraColumn,
    tokens: SourceEntry,
    ids: Int64s,
    rows: Int64s,
    blocks: Sequence[DecodedBlock],
    starts: Int64s,
    decoded: dict[int, tuple[int, DecodedBlock]],
) -> None:
    """Check that the first token of each block is in the same row in both columns, and that rows
    begin at the same positions within the block.

    Args:
        ids, blocks: the blocks of tokens.
        rows: int64 [n], row of each block's first piece, counted from the source's first row.
        starts: int64 [n], position of each block's first token among the source's tokens.
        decoded: the column's blocks, as `_fetch` returns them.

    Raises: CorruptFileError.
    """
    column_ids = np.array(sorted(decoded), np.int64)
    column_blocks = [decoded[i][1] for i in sorted(decoded)]
    column_starts = np.array([decoded[i][0] for i in sorted(decoded)], np.int64)
    flags = snapshot.blocks(column_ids)["flags"]
    column_rows = _first_rows(snapshot, column.entry, column_ids, flags)
    continues = ((flags & STARTS_MID_DOCUMENT) > 0).tolist()
    # Positions at which rows of the column begin
    edges = [
        start + block.offsets[int(continued) : -1]
        for start, block, continued in zip(
            column_starts.tolist(), column_blocks, continues, strict=True
        )
    ]
    column_edges = np.concatenate([*edges, np.zeros(0, np.int64)])
    for i, block, start, first_row in zip(
        ids.tolist(), blocks, starts.tolist(), rows.tolist(), strict=True
    ):
        if not len(block.tokens):
            continue
        first_piece = _piece(block, 0)
        row = first_row + first_piece
        number = int(np.searchsorted(column_starts, start, side="right")) - 1
        column_piece = _piece(column_blocks[number], start - int(column_starts[number]))
        if int(column_rows[number]) + column_piece != row:
            raise _mismatch_error(snapshot, column, tokens, i, row)
        stop = start + len(block.tokens)
        expected = start + block.offsets[first_piece + 1 : -1]
        # Rows without tokens at the block's end may belong to the next block
        expected = expected[expected < stop]
        after = int(np.searchsorted(column_edges, start, side="right"))
        found = column_edges[after:][: len(expected) + 1]
        found = found[found < stop]
        if len(expected) == len(found) and (expected == found).all():
            continue
        num_common = min(len(expected), len(found))
        differ = np.flatnonzero(expected[:num_common] != found[:num_common])
        first_different = int(differ[0]) if len(differ) else num_common
        raise _mismatch_error(snapshot, column, tokens, i, row + first_different)


def _first_rows(
    snapshot: Snapshot, entry: ColumnEntry, ids: Int64s, flags: npt.NDArray[np.uint8]
) -> Int64s:
    """Return the row of each block's first piece, counted from the column's first row:
    int64 [n]."""
    counts = snapshot.running("rows_before", np.append(ids, entry.blocks.start))
    rows: Int64s = counts[:-1] - counts[-1]
    return rows - ((flags & STARTS_MID_DOCUMENT) > 0)


def _piece(block: DecodedBlock, token: int) -> int:
    """Return the number of the piece, within a block, that contains a token of the block."""
    return int(np.searchsorted(block.offsets, token, side="right")) - 1


def _mismatch_error(
    snapshot: Snapshot, column: ExtraColumn, tokens: SourceEntry, i: int, row: int
) -> CorruptFileError:
    """Make the error about a row of a source that begins in block i."""
    file = int(snapshot.file_of([i])[0])
    first_block = snapshot.file(file).first_block
    row -= int(np.diff(snapshot.running("rows_before", [tokens.blocks.start, first_block]))[0])
    return CorruptFileError(
        snapshot.path(file),
        f"row {row}: its list in column {column.column!r} does not have one value per token (nulls "
        "not counted); rewrite the file, and build the run under another name (`run:`)",
        offset=int(snapshot.blocks(np.array([i]))[0]["offset"]),
    )
