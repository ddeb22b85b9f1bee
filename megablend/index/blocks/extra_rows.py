"""Check that the rows of an extra column of lists begin at the same tokens as the rows of its
source. If they did not, numbers of the column would be assigned to the wrong tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import CorruptFileError
from megablend.formats.base import STARTS_MID_DOCUMENT, DecodedBlock
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.source_entry import ColumnEntry, SourceEntry


class TokenBlocks(NamedTuple):
    """The positions of n blocks of tokens within the rows and the tokens of their source."""

    ids: Int64s
    """Numbers of the blocks in the index: int64 [n]."""
    first_rows: Int64s
    """Number of the row that contains each block's first piece: int64 [n]. Rows are numbered within
    the source."""
    first_tokens: Int64s
    """Position of each block's first token among the source's tokens: int64 [n]."""
    num_pieces: Int64s
    """Number of pieces of each block: int64 [n]."""
    num_tokens: Int64s
    """Number of tokens of each block: int64 [n]."""


class ColumnBlocks(NamedTuple):
    """m blocks of an extra column, in ascending order."""

    ids: Int64s
    """Numbers of the blocks in the index: int64 [m]."""
    starts: Int64s
    """Position of each block's first value in the column: int64 [m]."""
    blocks: Sequence[DecodedBlock]


def check_rows(
    snapshot: Snapshot,
    source: SourceEntry,
    column: ColumnEntry,
    tokens: TokenBlocks,
    blocks: Sequence[DecodedBlock],
    found: ColumnBlocks,
) -> None:
    """Check, for blocks of a source, that the source's rows and the rows of an extra column begin
    at the same tokens.

    Args:
        tokens, blocks: positions and content of the blocks of tokens.
        found: the blocks of the extra column that contain the values for these tokens.

    Raises: CorruptFileError.
    """
    flags = snapshot.blocks(found.ids)["flags"]
    column_rows = find_first_rows(snapshot, column, found.ids, flags)
    row_starts = _list_row_starts(found, flags)
    for i, block in enumerate(blocks):
        if not len(block.tokens):
            continue
        start = int(tokens.first_tokens[i])
        stop = start + len(block.tokens)
        first_piece = _find_piece(block, 0)
        row = int(tokens.first_rows[i]) + first_piece
        number = int(np.searchsorted(found.starts, start, side="right")) - 1
        column_piece = _find_piece(found.blocks[number], start - int(found.starts[number]))
        if column_rows[number] + column_piece != row:
            raise _mismatch(snapshot, source, column, tokens.ids[i], row)
        expected = start + block.offsets[first_piece + 1 : -1]
        # Rows without tokens at the block's end may belong to the next block
        expected = expected[expected < stop]
        after = np.searchsorted(row_starts, start, side="right")
        before = np.searchsorted(row_starts, stop, side="left")
        different = _find_difference(expected, row_starts[after:before])
        if different is not None:
            raise _mismatch(snapshot, source, column, tokens.ids[i], row + different)


def find_first_rows(
    snapshot: Snapshot, entry: ColumnEntry, ids: Int64s, flags: npt.NDArray[np.uint8]
) -> Int64s:
    """Return the number of the row that contains each block's first piece. Rows are numbered within
    the column.

    Args:
        ids: int64 [n], the blocks.
        flags: uint8 [n], the blocks' flags.

    Returns: int64 [n].
    """
    counts = snapshot.running("rows_before", np.append(ids, entry.blocks.start))
    rows: Int64s = counts[:-1] - counts[-1]
    return rows - ((flags & STARTS_MID_DOCUMENT) > 0)


def _list_row_starts(column_blocks: ColumnBlocks, flags: npt.NDArray[np.uint8]) -> Int64s:
    """Return the position of each row's first value in a column: int64 [rows]."""
    row_starts = [np.zeros(0, np.int64)]
    continues = ((flags & STARTS_MID_DOCUMENT) > 0).tolist()
    for start, block, continued in zip(
        column_blocks.starts, column_blocks.blocks, continues, strict=True
    ):
        row_starts.append(start + block.offsets[int(continued) : -1])
    return np.concatenate(row_starts)


def _find_piece(block: DecodedBlock, token: int) -> int:
    """Return the index of the piece that contains a token. `token` is the token's index in the
    block."""
    return int(np.searchsorted(block.offsets, token, side="right")) - 1


def _find_difference(expected: Int64s, actual: Int64s) -> int | None:
    """Return the index of the first item at which two arrays differ, or None if they are equal."""
    num_common = min(len(expected), len(actual))
    different = np.flatnonzero(expected[:num_common] != actual[:num_common])
    if len(different):
        return int(different[0])
    return None if len(expected) == len(actual) else num_common


def _mismatch(
    snapshot: Snapshot, source: SourceEntry, column: ColumnEntry, block: int, row: int
) -> CorruptFileError:
    """Return an error about a row that has the wrong number of values and begins in the given
    block."""
    file = int(snapshot.file_of([block])[0])
    first_block = snapshot.files.entry(file).first_block
    row -= int(np.diff(snapshot.running("rows_before", [source.blocks.start, first_block]))[0])
    return CorruptFileError(
        snapshot.path(file),
        f"the list in row {row} of column {column.column!r} does not have one value per token (nulls "
        "not counted); rewrite the file, and build the run under another name (`run:`)",
        offset=int(snapshot.blocks(np.array([block]))[0]["offset"]),
    )
