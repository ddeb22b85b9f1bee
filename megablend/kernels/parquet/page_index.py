"""Parse page indexes (OffsetIndex and ColumnIndex) to arrays.

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
"""Bytes of the smallest PageLocation: three fields, each with a header and one byte, and an end."""
MAX_OFFSET = 1 << 48
"""Upper bound of plausible offsets, sizes and numbers of rows."""
MAX_PAGE_BYTES = (1 << 31) - 1
"""Maximum size of a page."""
MAX_LEVELS = 1 << 40
"""Upper bound of plausible counts of levels of a page."""

# Ids of fields of OffsetIndex, PageLocation and ColumnIndex
PAGE_LOCATIONS = 1
LOCATION_OFFSET = 1
LOCATION_SIZE = 2
LOCATION_FIRST_ROW = 3
NULL_COUNTS = 5
DEF_LEVELS = 7

NONE = 0
"""Nothing is wrong."""
UNREADABLE = 1
"""The bytes are not valid Thrift, or not an index; `metadata.thrift` reports why."""
NO_PAGES = 2
"""The index lists no pages."""
BAD_OFFSET = 3
BAD_SIZE = 4
BAD_ROW = 5
"""The offset, the size or the first row of page `detail` is negative or implausibly large."""
TOO_LARGE = 6
"""Page `detail` is larger than MAX_PAGE_BYTES."""
OVERLAP = 7
"""Page `detail` begins before its chunk, or extends beyond the next page or the limit."""
INCOMPLETE = 8
"""Some counts of kind `detail` (0 nulls, 1 definition levels) are missing."""
BAD_COUNT = 9
"""A count of kind `detail` is negative or implausibly large."""


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
    """Parse and check OffsetIndexes: pages must be in order, must not overlap, and must be within
    their chunk.

    Args:
        indexes: uint8, the encoded OffsetIndexes.
        begins, ends: int64 [n], where each OffsetIndex is in `indexes`.
        starts: int64 [n], byte of the file at which each chunk begins.
        limit: offset in the file at or before which all pages must end.
        num_rows: int64 [n], number of rows of each chunk.
        first_page: int64 [n + 1], filled with the number of each chunk's first page.
        offsets: int64 [m], filled with the offset of each page in the file; m is an upper bound of
            the number of pages, one for MIN_LOCATION_BYTES.
        sizes: int64 [m], filled with the size of each page in bytes, header included.
        rows: int64 [m], filled with the number of rows that begin in each page; -1 for the pages of
            a chunk if their first rows do not ascend from 0 to the chunk's number of rows:
            ClickHouse up to 25.6 counts elements in place of rows (ClickHouse#83876).

    Returns: the number of the first wrong index, its problem, and a detail; n, NONE and 0 if none
        is wrong.
    """
    data = pointer_at(indexes.ctypes.data, len(indexes))
    filled = 0
    first_page[0] = 0
    for i in range(len(begins)):
        count = _parse_locations(
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
        if offsets[first] < starts[i]:
            return i, OVERLAP, first
        is_ordered = rows[first] == 0
        for j in range(first, filled):
            is_last = j + 1 == filled
            if offsets[j] + sizes[j] > (limit if is_last else offsets[j + 1]):
                return i, OVERLAP, j
            rows[j] = (num_rows[i] if is_last else rows[j + 1]) - rows[j]
            is_ordered = is_ordered and rows[j] >= 0
        if not is_ordered:
            rows[first:filled] = -1
    return len(begins), NONE, 0


@device
def _bad_number(offset: int, size: int, row: int) -> int:
    """Return the problem of a page's location; NONE if there is none."""
    if not 0 <= offset <= MAX_OFFSET:
        return BAD_OFFSET
    if not 0 <= size <= MAX_OFFSET:
        return BAD_SIZE
    if not 0 <= row <= MAX_OFFSET:
        return BAD_ROW
    return TOO_LARGE if size > MAX_PAGE_BYTES else NONE


@device
def _parse_locations(
    data: Pointer, position: int, end: int, offsets: Int64s, sizes: Int64s, first_rows: Int64s
) -> int:
    """Parse an OffsetIndex. Returns the number of its pages, or an error code of
    `kernels.parquet.thrift`."""
    field = 0
    count = UNUSUAL
    while True:
        position, field, kind = next_field(data, position, end, field)
        if position < 0 or kind == 0:
            break
        if field == PAGE_LOCATIONS and kind == LIST:
            position, count, element = list_header(data, position, end)
            if count > len(offsets) or (count and element != STRUCT):
                return UNUSUAL
            for i in range(count):
                position, offsets[i], sizes[i], first_rows[i] = _parse_location(data, position, end)
                if position < 0:
                    break
        else:
            position = skip(data, position, end, kind)
        if position < 0:
            break
    return count if position >= 0 else position


@device
def _parse_location(data: Pointer, position: int, end: int) -> tuple[int, int, int, int]:
    """Parse a PageLocation. Returns the position after it, offset, size, and first row."""
    offset = size = row = np.int64(0)
    field = 0
    seen = 0
    while True:
        position, field, kind = next_field(data, position, end, field)
        if position < 0 or kind == 0:
            break
        if LOCATION_OFFSET <= field <= LOCATION_FIRST_ROW:
            position, value = integer(data, position, end, kind)
            seen |= 1 << field
            if field == LOCATION_OFFSET:
                offset = value
            elif field == LOCATION_SIZE:
                size = value
            else:
                row = value
        else:
            position = skip(data, position, end, kind)
        if position < 0:
            break
    required = 1 << LOCATION_OFFSET | 1 << LOCATION_SIZE | 1 << LOCATION_FIRST_ROW
    if position >= 0 and seen != required:
        position = UNUSUAL
    return position, offset, size, row


@kernel
def page_counts(
    indexes: Bytes,
    begins: Int64s,
    ends: Int64s,
    first_page: Int64s,
    nulls: Int64s,
    levels: Int64s,
    num_counts: Int64s,
) -> tuple[int, int, int]:
    """Parse and check the counts of ColumnIndexes.

    Histograms of repetition levels are not read: the rows of a page are known from the OffsetIndex,
    and Arrow C++ 19 to 25 counts rows of more than 16,384 elements wrong (apache/arrow#50778).

    Args:
        indexes: uint8, the encoded ColumnIndexes.
        begins, ends: int64 [n], where each ColumnIndex is in `indexes`; a chunk without one has an
            empty range.
        first_page: int64 [n + 1], number of each chunk's first page.
        nulls: int64 [1, num_pages], filled with the number of nulls in each page; 0 if the index
            has no counts.
        levels: int64 [max_def + 1, num_pages], filled with the number of levels in each page, by
            definition level.
        num_counts: int64 [n, 2], filled with the number of counts of each kind: 0, or one for each
            page and level.

    Returns: the number of the first wrong index, its problem, and a detail; n, NONE and 0 if none
        is wrong.
    """
    data = pointer_at(indexes.ctypes.data, len(indexes))
    num_counts[:] = 0
    for i in range(len(begins)):
        pages = slice(first_page[i], first_page[i + 1])
        kinds = nulls[:, pages], levels[:, pages]
        if begins[i] < ends[i]:
            after = _parse_counts(data, begins[i], ends[i], kinds[0], kinds[1], num_counts[i])
            if after < 0:
                return i, UNREADABLE, 0
        for kind in range(1, -1, -1):
            if not num_counts[i, kind]:
                kinds[kind][:] = 0
            if num_counts[i, kind] and num_counts[i, kind] != kinds[kind].size:
                return i, INCOMPLETE, kind
            if num_counts[i, kind] and not _are_counts(kinds[kind]):
                return i, BAD_COUNT, kind
    return len(begins), NONE, 0


@device
def _are_counts(counts: Int64s) -> bool:
    """Return whether all counts are plausible."""
    for level in range(counts.shape[0]):
        for page in range(counts.shape[1]):
            if not 0 <= counts[level, page] <= MAX_LEVELS:
                return False
    return True


@device
def _parse_counts(
    data: Pointer,
    position: int,
    end: int,
    nulls: Int64s,
    levels: Int64s,
    num_counts: Int64s,
) -> int:
    """Parse a ColumnIndex, and fill its counts and `num_counts` [2]. Returns the position after
    it."""
    field = 0
    while True:
        position, field, kind = next_field(data, position, end, field)
        if position < 0 or kind == 0:
            return position
        if field in (NULL_COUNTS, DEF_LEVELS):
            if kind != LIST:
                return UNUSUAL
            position, count, element = list_header(data, position, end)
            if position >= 0 and count and not I8 <= element <= I64:
                return UNUSUAL
            if field == NULL_COUNTS:
                num_counts[0] = count
                position = _parse_integers(data, position, end, element, count, nulls)
            else:
                num_counts[1] = count
                position = _parse_integers(data, position, end, element, count, levels)
        else:
            position = skip(data, position, end, kind)
        if position < 0:
            return position


@device
def _parse_integers(
    data: Pointer, position: int, end: int, kind: int, count: int, out: Int64s
) -> int:
    """Parse the elements of a list into `out`, column by column, if `out` has the same number of
    elements; otherwise skip them. Returns the position after them."""
    height, width = out.shape
    if count != height * width:
        for _ in range(count):
            position, _ = integer(data, position, end, kind)
            if position < 0:
                break
        return position
    for page in range(width):
        for level in range(height):
            position, out[level, page] = integer(data, position, end, kind)
            if position < 0:
                return position
    return position
