"""The documents of the token column in a record batch.

Source: Arrow columnar format, "Variable-size List Layout", "Fixed-Size List Layout", "Validity
    bitmaps".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Bools, running_totals
from megablend.formats.arrow.buffers import Buffers
from megablend.formats.arrow.column import Column, Level
from megablend.formats.arrow.message import Batch, BatchError, first_buffer
from megablend.formats.base import DecodedBlock


@dataclass(frozen=True, slots=True)
class Documents:
    """The rows of a batch as ranges of its values."""

    first: int
    """Position of the first value that belongs to a row."""
    num_values: int
    """Number of values, from `first` on, that belong to rows."""
    keep: Bools | None
    """Whether each value is a token: bool [num_values]; None if all are."""
    offsets: npt.NDArray[np.int64]
    """Offsets of the rows among the tokens, int64 [rows + 1]: row i has tokens offsets[i] to
    offsets[i+1]."""


def find_documents(batch: Batch, column: Column, buffers: Buffers) -> Documents:
    """Find the tokens of each row among the column's values, from validity bitmaps and list
    offsets.

    Null rows and rows of null structs have no tokens; null elements are not tokens.
    Raises: BatchError if lengths, offsets or numbers of nulls are inconsistent.
    """
    *parents, values = column.levels
    _check_values(batch, column, buffers)
    bounds = _row_bounds(batch, column, buffers)
    first = int(bounds[0])
    last = int(bounds[-1])
    keep: Bools | None = None
    for level in parents:
        valid = _validity(batch, level, buffers)
        if valid is not None:
            keep = valid if keep is None else keep & valid
    if keep is not None:
        keep = np.repeat(keep, np.diff(bounds))
    elements = _validity(batch, values, buffers)
    if elements is not None:
        keep = elements[first:last] if keep is None else keep & elements[first:last]
    if keep is None:
        return Documents(first, last - first, None, bounds - first)
    kept_before = running_totals(keep)
    return Documents(first, last - first, keep, kept_before[bounds - first])


def decode(batch: Batch, column: Column, buffers: Buffers) -> DecodedBlock:
    """Decode the tokens and documents of a batch. Raises: BatchError if the batch is
    inconsistent."""
    data = buffers.read(first_buffer(batch, column.levels[-1]) + 1)
    documents = find_documents(batch, column, buffers)
    first = documents.first
    last = documents.first + documents.num_values
    dtype = np.dtype(column.token_dtype)
    if dtype == np.bool_:
        tokens = np.unpackbits(data, count=last, bitorder="little").view(np.bool_)[first:]
    else:
        tokens = data[first * dtype.itemsize : last * dtype.itemsize].view(dtype.newbyteorder("<"))
    if documents.keep is not None:
        tokens = tokens[documents.keep]
    tokens.flags.writeable = False
    return DecodedBlock(tokens, documents.offsets)


def _check_values(batch: Batch, column: Column, buffers: Buffers) -> None:
    """Compare the lengths that a batch states with the sizes of its buffers, so that no array is
    allocated that the file cannot fill. Raises: BatchError."""
    *parents, values = column.levels
    slots = int(batch.nodes[values.node]["length"])
    levels_of_rows = column.levels if column.kind == "flat" else parents
    lengths = [int(batch.nodes[level.node]["length"]) for level in levels_of_rows]
    if any(length != batch.rows for length in lengths):
        raise BatchError(f"has {batch.rows} rows, but its columns have {lengths}")
    bits = 1 if column.token_dtype == "bool" else 8 * np.dtype(column.token_dtype).itemsize
    need = (slots * bits + 7) // 8
    have = buffers.size(first_buffer(batch, values) + 1)
    if batch.rows < 0 or slots < batch.rows * column.width or not 0 <= need <= have:
        raise BatchError(
            f"states {batch.rows} rows and {slots} values, which do not fit in its {have} bytes"
        )


def _row_bounds(batch: Batch, column: Column, buffers: Buffers) -> npt.NDArray[np.int64]:
    """Return the bounds of the rows among the values, int64 [rows + 1]: row i has the values
    bounds[i] to bounds[i+1]. Raises: BatchError if the list offsets are invalid or incomplete."""
    if column.kind in ("flat", "fixed_size_list"):
        return np.arange(batch.rows + 1, dtype=np.int64) * max(column.width, 1)
    width = 4 if column.kind == "list" else 8
    number = first_buffer(batch, column.levels[-2]) + 1
    # Without rows, the offsets may be absent
    if not batch.rows:
        return np.zeros(1, np.int64)
    data = buffers.read(number)
    if len(data) < (batch.rows + 1) * width:
        raise BatchError(f"has only {len(data)} bytes of list offsets for {batch.rows} rows")
    bounds = data[: (batch.rows + 1) * width].view(f"<i{width}").astype(np.int64)
    slots = int(batch.nodes[column.levels[-1].node]["length"])
    if bounds[0] < 0 or bounds[-1] > slots or (np.diff(bounds) < 0).any():
        raise BatchError(f"has list offsets that decrease, or are outside its {slots} values")
    return bounds


def _validity(batch: Batch, level: Level, buffers: Buffers) -> Bools | None:
    """Return whether each item of a level is valid (not null), bool [length], or None if all are.
    Raises: BatchError if the bitmap is too short, or does not have the stated number of nulls."""
    length, nulls = (int(value) for value in batch.nodes[level.node])
    if not nulls:
        return None
    number = first_buffer(batch, level)
    data = buffers.read(number)
    # Nulls were not counted, and there is no bitmap: nothing is null
    if not len(data) and nulls < 0:
        return None
    if len(data) * 8 < length:
        raise BatchError(f"has a validity bitmap of only {len(data)} bytes for {length} values")
    valid = np.unpackbits(data, count=length, bitorder="little").astype(bool)
    if nulls > 0 and length - int(valid.sum()) != nulls:
        raise BatchError(f"reports {nulls} null values, but {length - int(valid.sum())} are null")
    return valid
