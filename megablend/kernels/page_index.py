"""The page index: OffsetIndex and ColumnIndex to arrays.

Source: parquet-format, PageIndex.md and parquet.thrift (OffsetIndex, PageLocation, ColumnIndex).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import Pointer, device, kernel, pointer_at
from megablend.kernels.thrift import I8, I64, LIST, STRUCT, UNUSUAL, integer, list_header, next_field, skip

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

MIN_LOCATION_BYTES = 7
"""A PageLocation: three fields of a header and a byte each, and its end."""


@kernel
def page_locations(index: Bytes, offsets: Int64s, sizes: Int64s, first_rows: Int64s) -> int:
    """Read an OffsetIndex. Returns the number of its pages; below 0, see `kernels.thrift`.

    Args:
        index: uint8 [n], an OffsetIndex.
        offsets: int64, room for n // MIN_LOCATION_BYTES, filled: bytes of the file at which pages begin.
        sizes: int64, as many, filled: bytes, headers included.
        first_rows: int64, as many, filled: rows of the row group before each page.
    """
    data, end = pointer_at(index.ctypes.data, len(index)), len(index)
    at, field, found = 0, 0, UNUSUAL
    while True:
        at, field, kind = next_field(data, at, end, field)
        if at < 0 or kind == 0:
            break
        if field == 1 and kind == LIST:
            at, found, element = list_header(data, at, end)
            if found > len(offsets) or (found and element != STRUCT):
                return UNUSUAL
            for i in range(found):
                at, offsets[i], sizes[i], first_rows[i] = _location(data, at, end)
                if at < 0:
                    break
        else:
            at = skip(data, at, end, kind)
        if at < 0:
            break
    return found if at >= 0 else at


@device
def _location(data: Pointer, at: int, end: int) -> tuple[int, int, int, int]:
    """Of a PageLocation: the position after it, offset, size, first row."""
    offset = size = row = np.int64(0)
    field, seen = 0, 0
    while True:
        at, field, kind = next_field(data, at, end, field)
        if at < 0 or kind == 0:
            break
        if 1 <= field <= 3:
            at, value = integer(data, at, end, kind)
            seen |= 1 << field
            if field == 1:
                offset = value
            elif field == 2:
                size = value
            else:
                row = value
        else:
            at = skip(data, at, end, kind)
        if at < 0:
            break
    return (at if at < 0 or seen == 0b1110 else UNUSUAL), offset, size, row


@kernel
def page_counts(
    index: Bytes, nulls: Int64s, rep_histograms: Int64s, def_histograms: Int64s
) -> tuple[int, int, int, int]:
    """Read the counts of a ColumnIndex.

    Args:
        index: uint8 [n], a ColumnIndex.
        nulls: int64 [num_pages], filled.
        rep_histograms: int64 [num_pages * (max_rep + 1)], filled.
        def_histograms: int64 [num_pages * (max_def + 1)], filled.

    Returns: 0 (below 0, see `kernels.thrift`), and how many counts of each kind there are; what has no room is left out.
    """
    data, end = pointer_at(index.ctypes.data, len(index)), len(index)
    at, field = 0, 0
    num_nulls = num_reps = num_defs = 0
    while True:
        at, field, kind = next_field(data, at, end, field)
        if at < 0 or kind == 0:
            break
        if 5 <= field <= 7:
            if kind != LIST:
                return UNUSUAL, 0, 0, 0
            at, count, element = list_header(data, at, end)
            if at >= 0 and count and not I8 <= element <= I64:
                return UNUSUAL, 0, 0, 0
            if field == 5:
                at, num_nulls = _integers(data, at, end, element, count, nulls), count
            elif field == 6:
                at, num_reps = _integers(data, at, end, element, count, rep_histograms), count
            else:
                at, num_defs = _integers(data, at, end, element, count, def_histograms), count
        else:
            at = skip(data, at, end, kind)
        if at < 0:
            break
    return min(at, 0), num_nulls, num_reps, num_defs


@device
def _integers(data: Pointer, at: int, end: int, kind: int, count: int, out: Int64s) -> int:
    for i in range(count):
        if at < 0:
            break
        at, value = integer(data, at, end, kind)
        if i < len(out):
            out[i] = value
    return at
