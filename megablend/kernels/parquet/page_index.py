"""The page index: OffsetIndex and ColumnIndex to arrays.

Source: parquet-format, PageIndex.md and parquet.thrift (OffsetIndex, PageLocation, ColumnIndex).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.intrinsics import Pointer, pointer_at
from megablend.jit import device, kernel
from megablend.kernels.parquet.thrift import (
    I8,
    I32,
    I64,
    LIST,
    STRUCT,
    UNUSUAL,
    integer,
    list_header,
    next_field,
    skip,
)

Bytes = npt.NDArray[np.uint8]

MIN_LOCATION_BYTES = 7
"""A PageLocation: three fields of a header and a byte each, and its end."""
FIRST_I64 = NEXT_I64 = 1 << 4 | I64
"""A field's header: its number is by one higher than that of the field before it."""
NEXT_I32 = 1 << 4 | I32
MAX_OFFSET = 1 << 48
"""Upper bound of plausible offsets, sizes and numbers of rows."""
MAX_PAGE_BYTES = (1 << 31) - 1
MAX_LEVELS = 1 << 40
"""Upper bound of plausible level counts of a page."""

NONE = 0
"""Nothing is wrong."""
UNREADABLE = 1
"""It is not valid Thrift, or not an index; `metadata.thrift` reports why."""
NO_PAGES = 2
BAD_OFFSET = 3
BAD_SIZE = 4
BAD_ROW = 5
"""A number of page `detail` is negative or implausibly large."""
TOO_LARGE = 6
"""Page `detail` is."""
OVERLAP = 7
"""Page `detail` begins before its chunk, or extends beyond the next page or the limit."""
DISORDER = 8
"""Rows are not in order: page `detail` begins after the next page, or the first page does not begin
at row 0."""
INCOMPLETE = 9
"""There are some counts of kind `detail` (0 nulls, 1 repetition, 2 definition levels), but not
all."""
BAD_COUNT = 10
SUMS_DIFFER = 11
"""The histograms of a page's definition and repetition levels have different sums."""


@kernel
def page_locations(
    indexes: Bytes,
    begins: Int64s,
    ends: Int64s,
    starts: Int64s,
    limit: int,
    num_rows: Int64s,
    first_page: Int64s,
    offsets: Int64s,
    sizes: Int64s,
    rows: Int64s,
) -> tuple[int, int, int]:
    """Read and check OffsetIndexes: pages in order, apart, within their chunk.

    Args:
        indexes: uint8, OffsetIndexes.
        begins, ends: int64 [n], the position of each in `indexes`.
        starts: int64 [n], the byte of the file before which a chunk's pages do not begin.
        limit: the byte beyond which none goes.
        num_rows: int64 [n], of each chunk's row group.
        first_page: int64 [n + 1], filled: the pages of each.
        offsets: int64, room for a page in MIN_LOCATION_BYTES of the indexes, filled: bytes of the
            file at which pages begin.
        sizes: int64, as many, filled: bytes, headers included.
        rows: int64, as many, filled: rows that begin in each page.

    Returns: the number of the first index that is wrong, what is wrong with it, and a detail; n,
        NONE and 0 if none is.
    """
    data = pointer_at(indexes.ctypes.data, len(indexes))
    filled = 0
    first_page[0] = 0
    for i in range(len(begins)):
        count = _locations(
            data, begins[i], ends[i], offsets[filled:], sizes[filled:], rows[filled:]
        )
        if count <= 0:
            return i, UNREADABLE if count else NO_PAGES, 0
        first = filled
        filled = filled + count
        first_page[i + 1] = filled
        for j in range(first, filled):
            problem = _bad_number(offsets[j], sizes[j], rows[j])
            if problem != NONE:
                return i, problem, j
        if offsets[first] < starts[i] or rows[first] != 0:
            return i, OVERLAP if offsets[first] < starts[i] else DISORDER, first
        for j in range(first, filled):
            is_last = j + 1 == filled
            if offsets[j] + sizes[j] > (limit if is_last else offsets[j + 1]):
                return i, OVERLAP, j
            rows[j] = (num_rows[i] if is_last else rows[j + 1]) - rows[j]
            if rows[j] < 0:
                return i, DISORDER, j
    return len(begins), NONE, 0


@device
def _bad_number(offset: int, size: int, row: int) -> int:
    if not 0 <= offset <= MAX_OFFSET:
        return BAD_OFFSET
    if not 0 <= size <= MAX_OFFSET:
        return BAD_SIZE
    if not 0 <= row <= MAX_OFFSET:
        return BAD_ROW
    return TOO_LARGE if size > MAX_PAGE_BYTES else NONE


@device
def _locations(
    data: Pointer, at: int, end: int, offsets: Int64s, sizes: Int64s, first_rows: Int64s
) -> int:
    """Parse an OffsetIndex. Returns the number of its pages; below 0, see `kernels.parquet.thrift`."""
    field = 0
    found = UNUSUAL
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
    """Parse a PageLocation. Returns the position after it, offset, size, first row."""
    offset = size = row = np.int64(0)
    if at < end and data[at] == FIRST_I64:  # as all writers write it
        then, offset = integer(data, at + 1, end, I64)
        if 0 <= then < end and data[then] == NEXT_I32:
            then, size = integer(data, then + 1, end, I32)
            if 0 <= then < end and data[then] == NEXT_I64:
                then, row = integer(data, then + 1, end, I64)
                if 0 <= then < end and data[then] == 0:
                    return then + 1, offset, size, row
    field = 0
    seen = 0
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
) -> tuple[int, int, int]:
    """Read and check the counts of ColumnIndexes.

    Args:
        indexes: uint8, ColumnIndexes.
        begins, ends: int64 [n], the position of each in `indexes`; of no bytes if there is none.
        first_page: int64 [n + 1], the pages of each.
        nulls: int64 [1, num_pages], filled; with 0 if there are no counts.
        rep_levels: int64 [max_rep + 1, num_pages], filled: levels of each height.
        def_levels: int64 [max_def + 1, num_pages], filled.
        found: int64 [n, 3], filled: how many counts of each kind there are: none, or all.

    Returns: the number of the first index that is wrong, what is wrong with it, and a detail; n,
        NONE and 0 if none is.
    """
    data = pointer_at(indexes.ctypes.data, len(indexes))
    found[:] = 0
    for i in range(len(begins)):
        pages = slice(first_page[i], first_page[i + 1])
        kinds = nulls[:, pages], rep_levels[:, pages], def_levels[:, pages]
        if (
            begins[i] < ends[i]
            and _counts(data, begins[i], ends[i], kinds[0], kinds[1], kinds[2], found[i]) < 0
        ):
            return i, UNREADABLE, 0
        for kind in range(2, -1, -1):
            if not found[i, kind]:
                kinds[kind][:] = 0
            if found[i, kind] and found[i, kind] != kinds[kind].size:
                return i, INCOMPLETE, kind
            if found[i, kind] and not _are_counts(kinds[kind]):
                return i, BAD_COUNT, kind
        if found[i, 1] and found[i, 2] and not _agree(kinds[1], kinds[2]):
            return i, SUMS_DIFFER, 0
    return len(begins), NONE, 0


@device
def _are_counts(counts: Int64s) -> bool:
    for level in range(counts.shape[0]):
        for page in range(counts.shape[1]):
            if not 0 <= counts[level, page] <= MAX_LEVELS:
                return False
    return True


@device
def _agree(some: Int64s, others: Int64s) -> bool:
    """Whether both count equally many levels in each page."""
    for page in range(some.shape[1]):
        difference = np.int64(0)
        for level in range(some.shape[0]):
            difference += some[level, page]
        for level in range(others.shape[0]):
            difference -= others[level, page]
        if difference:
            return False
    return True


@device
def _counts(
    data: Pointer,
    at: int,
    end: int,
    nulls: Int64s,
    rep_levels: Int64s,
    def_levels: Int64s,
    found: Int64s,
) -> int:
    """Parse a ColumnIndex. Returns the position after it."""
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
    """Parse a list's elements into `out`, column by column, if there are as many. Returns the
    position after them."""
    height, width = out.shape
    if count != height * width:
        for _ in range(count):
            at, _ = integer(data, at, end, kind)
            if at < 0:
                break
        return at
    for page in range(width):
        for level in range(height):
            at, out[level, page] = integer(data, at, end, kind)
            if at < 0:
                return at
    return at
