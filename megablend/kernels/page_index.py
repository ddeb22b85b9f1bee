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
def page_locations(
    indexes: Bytes, begins: Int64s, ends: Int64s, counts: Int64s, offsets: Int64s, sizes: Int64s, first_rows: Int64s
) -> int:
    """Read OffsetIndexes one after the other. Returns the number of the first that needs care; n if none does.

    Args:
        indexes: uint8, OffsetIndexes.
        begins, ends: int64 [n], where each one lies there.
        counts: int64 [n], filled: its pages.
        offsets: int64, room for a page in MIN_LOCATION_BYTES of the indexes, filled: bytes of the file at which pages begin.
        sizes: int64, as many, filled: bytes, headers included.
        first_rows: int64, as many, filled: rows of the row group before each page.
    """
    data, filled = pointer_at(indexes.ctypes.data, len(indexes)), 0
    for i in range(len(begins)):
        counts[i] = _locations(data, begins[i], ends[i], offsets[filled:], sizes[filled:], first_rows[filled:])
        if counts[i] < 0:
            return i
        filled += counts[i]
    return len(begins)


@device
def _locations(data: Pointer, at: int, end: int, offsets: Int64s, sizes: Int64s, first_rows: Int64s) -> int:
    """Of an OffsetIndex: the number of its pages; below 0, see `kernels.thrift`."""
    field, found = 0, UNUSUAL
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
    indexes: Bytes,
    begins: Int64s,
    ends: Int64s,
    first_page: Int64s,
    nulls: Int64s,
    rep_levels: Int64s,
    def_levels: Int64s,
    found: Int64s,
) -> int:
    """Read the counts of ColumnIndexes. Returns the number of the first that needs care; n if none does.

    Args:
        indexes: uint8, ColumnIndexes.
        begins, ends: int64 [n], where each one lies there; of no bytes where there is none.
        first_page: int64 [n + 1], the pages of each.
        nulls: int64 [1, num_pages], filled.
        rep_levels: int64 [max_rep + 1, num_pages], filled: levels of each height.
        def_levels: int64 [max_def + 1, num_pages], filled.
        found: int64 [n, 3], filled: how many counts of each kind there are; what has no room is left out.
    """
    data = pointer_at(indexes.ctypes.data, len(indexes))
    found[:] = 0
    for i in range(len(begins)):
        if begins[i] == ends[i]:
            continue
        pages = slice(first_page[i], first_page[i + 1])
        at = _counts(data, begins[i], ends[i], nulls[:, pages], rep_levels[:, pages], def_levels[:, pages], found[i])
        if at < 0:
            return i
    return len(begins)


@device
def _counts(
    data: Pointer, at: int, end: int, nulls: Int64s, rep_levels: Int64s, def_levels: Int64s, found: Int64s
) -> int:
    """Of a ColumnIndex: the position after it."""
    field = 0
    while True:
        at, field, kind = next_field(data, at, end, field)
        if at < 0 or kind == 0:
            return at
        if 5 <= field <= 7:
            if kind != LIST:
                return UNUSUAL
            at, count, element = list_header(data, at, end)
            if at >= 0 and count and not I8 <= element <= I64:
                return UNUSUAL
            found[field - 5] = count
            if field == 5:
                at = _integers(data, at, end, element, count, nulls)
            elif field == 6:
                at = _integers(data, at, end, element, count, rep_levels)
            else:
                at = _integers(data, at, end, element, count, def_levels)
        else:
            at = skip(data, at, end, kind)
        if at < 0:
            return at


@device
def _integers(data: Pointer, at: int, end: int, kind: int, count: int, out: Int64s) -> int:
    """Of a list's elements: the position after them. They are `out`'s columns, one after the other."""
    height, width = out.shape
    page, level = 0, 0
    for _ in range(count):
        if at < 0:
            break
        at, value = integer(data, at, end, kind)
        if page < width:
            out[level, page] = value
        level += 1
        if level == height:
            page, level = page + 1, 0
    return at
