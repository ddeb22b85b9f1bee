"""Extra columns: a number for each token of a block.

An extra column of a source is indexed with its own blocks. A column of lists has as many numbers in
each row as there are tokens: the n-th token of a source has the column's n-th number. A flat column
has one number per row, for all tokens of the row. Either way the numbers of a block of tokens are a
contiguous range of the column, wherever its blocks begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CorruptFileError
from megablend.formats.base import STARTS_MID_DOCUMENT, Array, DecodedBlock
from megablend.formats.eod import with_eod
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.source_entry import ColumnEntry, SourceEntry

Read = Callable[[list[int]], list[DecodedBlock]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraColumn:
    """An extra column of a source."""

    column: str
    entry: ColumnEntry
    """Its entry in the index."""
    dtype: np.dtype[np.generic]
    flat: bool
    """Whether it has one value per row, not a list with one value per token."""


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
        tokens: the source that the blocks are of.
        read: decodes blocks of the index.
        ids: int64 [n], the blocks' numbers in the index.
        blocks: [n], without end-of-document tokens.
        has_eod: one more number for each end-of-document token: that of the document's last token.

    Returns: for each block, one array per column, read-only.
    Raises: CorruptFileError if rows of the two columns have different numbers of values; as `read`
        does.
    """
    flags = snapshot.blocks(ids)["flags"]
    rows = _first_rows(snapshot, tokens, ids, flags)
    by_column = []
    for column in columns:
        if column.flat:
            counts = np.array([len(block.offsets) - 1 for block in blocks])
            first = rows
        else:
            counts = np.array([len(block.tokens) for block in blocks])
            before = snapshot.running("tokens_before", np.append(ids, tokens.blocks.start))
            first = before[:-1] - before[-1]
        # A document may end in a block without any of its tokens: its last number is the previous
        # one.
        in_front = (first > 0) & (not column.flat) & has_eod
        found, read_blocks = _fetch(snapshot, column, read, first - in_front, counts + in_front)
        if not column.flat:
            _check_rows(snapshot, column, tokens, ids, rows, blocks, first, read_blocks)
        fields = zip(blocks, found, in_front.tolist(), flags.tolist(), strict=True)
        by_column.append([_aligned(column, *field, has_eod=has_eod) for field in fields])
    return list(zip(*by_column, strict=True))


def list_extra_blocks(
    snapshot: Snapshot,
    columns: Sequence[ExtraColumn],
    tokens: SourceEntry,
    ids: Int64s,
    *,
    has_eod: bool,
) -> Iterator[tuple[Int64s, Int64s]]:
    """What `read_extra_columns` reads, by the index alone: for each column its blocks, int64 [m],
    and the place in `ids` of the block that needs each."""
    blocks = snapshot.blocks(ids)
    rows = _first_rows(snapshot, tokens, ids, blocks["flags"])
    before = snapshot.running("tokens_before", np.append(ids, tokens.blocks.start))
    for column in columns:
        first = rows if column.flat else before[:-1] - before[-1]
        continues = (blocks["flags"] & STARTS_MID_DOCUMENT) > 0
        counts = blocks["rows"] + continues if column.flat else blocks["tokens"]
        in_front = (first > 0) & (not column.flat) & has_eod
        _, firsts, stops = _find_blocks(snapshot, column, first - in_front, counts + in_front)
        which = np.repeat(np.arange(len(ids)), stops - firsts)
        skipped = np.cumsum(stops - firsts) - stops
        yield np.arange(len(which)) - skipped[which], which


def _aligned(
    column: ExtraColumn,
    block: DecodedBlock,
    found: Array,
    in_front: bool,
    flags: int,
    *,
    has_eod: bool,
) -> Array:
    """A number for each token, from one per row, or one per token and possibly one before them."""
    before = found[:1]
    numbers = np.repeat(found, np.diff(block.offsets)) if column.flat else found[in_front:]
    if has_eod:
        places = with_eod(
            DecodedBlock(np.arange(1, len(numbers) + 1), block.offsets), flags, 0
        ).tokens
        if len(places) > len(numbers):
            # At an end, the position of the last token before.
            numbers = np.concatenate([before, numbers])[np.maximum.accumulate(places)]
    numbers.setflags(write=False)
    return numbers


def _fetch(
    snapshot: Snapshot, column: ExtraColumn, read: Read, starts: Int64s, counts: Int64s
) -> tuple[list[Array], dict[int, tuple[int, DecodedBlock]]]:
    """Read ranges of a column's numbers. Returns them, and their blocks of the column with the
    numbers before each.

    Args:
        starts, counts: int64 [n], of the column's numbers.
    """
    origin, firsts, stops = _find_blocks(snapshot, column, starts, counts)
    needed = np.array(
        sorted(
            {
                i
                for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True)
                for i in range(first, stop)
            }
        ),
        np.int64,
    )
    before = (snapshot.running("tokens_before", needed) - origin).tolist()
    decoded = dict(
        zip(needed.tolist(), zip(before, read(needed.tolist()), strict=True), strict=True)
    )
    found = []
    for start, size, first, stop in zip(
        *(each.tolist() for each in (starts, counts, firsts, stops)), strict=True
    ):
        inside = [
            (block.tokens, start - count)
            for count, block in (decoded[i] for i in range(first, stop))
        ]
        parts = [numbers[max(0, begin) : begin + size] for numbers, begin in inside]
        found.append(np.concatenate([*parts, np.zeros(0, column.dtype)]))
    return found, decoded


def _find_blocks(
    snapshot: Snapshot, column: ExtraColumn, starts: Int64s, counts: Int64s
) -> tuple[int, Int64s, Int64s]:
    """Where a column begins among all numbers of the table; and for each range of its numbers, the
    first block that holds it, and the one after the last, int64 [n]."""
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
    """Check that each block's first token is in the same row in both columns, and rows begin at the
    same positions in it.

    Args:
        rows, starts: int64 [n], of each block's first piece and of its first token, counted from
            the source's first.
        decoded: as `_fetch` returns them.

    Raises: CorruptFileError.
    """
    places = np.array(sorted(decoded), np.int64)
    theirs = [decoded[i] for i in sorted(decoded)]
    flags = snapshot.blocks(places)["flags"]
    their_rows = _first_rows(snapshot, column.entry, places, flags)
    begins = np.array([before for before, _ in theirs], np.int64)
    continues = ((flags & STARTS_MID_DOCUMENT) > 0).tolist()
    edges = [
        before + block.offsets[int(on) : -1]
        for (before, block), on in zip(theirs, continues, strict=True)
    ]
    there = np.concatenate([*edges, np.zeros(0, np.int64)])
    for i, block, start, first_row in zip(
        ids.tolist(), blocks, starts.tolist(), rows.tolist(), strict=True
    ):
        if not len(block.tokens):
            continue
        first = _piece(block, 0)
        row = first_row + first
        at = int(np.searchsorted(begins, start, side="right")) - 1
        if int(their_rows[at]) + _piece(theirs[at][1], start - int(begins[at])) != row:
            raise _mismatch_error(snapshot, column, tokens, i, row)
        mine = start + block.offsets[first + 1 : -1]
        # Rows without tokens at its end may belong to the next block
        mine = mine[mine < start + len(block.tokens)]
        found = there[np.searchsorted(there, start, side="right") :][: len(mine) + 1]
        found = found[found < start + len(block.tokens)]
        if len(mine) == len(found) and (mine == found).all():
            continue
        both = min(len(mine), len(found))
        differ = np.flatnonzero(mine[:both] != found[:both])
        raise _mismatch_error(
            snapshot, column, tokens, i, row + (int(differ[0]) if len(differ) else both)
        )


def _first_rows(
    snapshot: Snapshot, entry: ColumnEntry, ids: Int64s, flags: npt.NDArray[np.uint8]
) -> Int64s:
    """The row of each block's first piece, counted from the column's first row."""
    counts = snapshot.running("rows_before", np.append(ids, entry.blocks.start))
    rows: Int64s = counts[:-1] - counts[-1]
    return rows - ((flags & STARTS_MID_DOCUMENT) > 0)


def _piece(block: DecodedBlock, place: int) -> int:
    """Which of a block's pieces its token at `place` is in."""
    return int(np.searchsorted(block.offsets, place, side="right")) - 1


def _mismatch_error(
    snapshot: Snapshot, column: ExtraColumn, tokens: SourceEntry, i: int, row: int
) -> CorruptFileError:
    """The error for a row of a source, in its block i."""
    file = int(snapshot.file_of([i])[0])
    first_block = snapshot.file(file).first_block
    row -= int(np.diff(snapshot.running("rows_before", [tokens.blocks.start, first_block]))[0])
    return CorruptFileError(
        snapshot.path(file),
        f"row {row}: its list in column {column.column!r} does not have one value per token (nulls "
        "not counted); rewrite the file, and build the run under another name (`run:`)",
        offset=int(snapshot.blocks(np.array([i]))[0]["offset"]),
    )
