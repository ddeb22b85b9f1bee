"""The chunks of one column from a Parquet footer: one pass over thousands of row groups, without
Python per group.

What is unusual or damaged is left to `metadata.column_chunk`,
which parses in Python and reports what is wrong.

Source: parquet-format, parquet.thrift (RowGroup, ColumnChunk, ColumnMetaData, Statistics,
    PageEncodingStats, SizeStatistics).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.intrinsics import Pointer, pointer_at
from megablend.jit import device, kernel
from megablend.kernels.parquet.thrift import (
    BINARY,
    FALSE,
    LIST,
    STRUCT,
    UNUSUAL,
    integer,
    list_header,
    next_field,
    skip,
    varint,
)

CHUNK_DTYPE = np.dtype(
    [
        ("row_group", "<i8"),
        ("start", "<i8"),  # first byte of the first page, dictionary included
        ("num_rows", "<i8"),
        ("physical", "<i8"),
        ("encodings", "<u8"),  # of values and levels, all pages together; a bit each
        ("codec", "<i8"),
        ("num_values", "<i8"),
        ("decoded_bytes", "<i8"),
        ("stored_bytes", "<i8"),
        ("data_page", "<i8"),
        ("dictionary_page", "<i8"),  # 0 where absent
        ("null_count", "<i8"),  # -1 where absent
        # which statistics of values there are: bit f, field f, of 4 bytes, or (7, 8) false; f + 8:
        # of 8
        ("ranges", "<i8"),
        ("old_max", "<u8"),  # Statistics.max, bytes as one little-endian integer; 0 where absent
        ("old_min", "<u8"),  # Statistics.min
        ("max_value", "<u8"),
        ("min_value", "<u8"),
        ("page_encodings", "<u8"),  # of data pages, a bit each; all bits where absent
        ("num_levels", "<i8"),  # counts in the histogram of definition levels; -1 where absent
        # their sum: not num_values where the writer counted wrong, as ClickHouse 26 does
        ("all_levels", "<i8"),
        ("top_level", "<i8"),  # the last of them
        ("offset_index", "<i8"),  # -1 where absent
        ("offset_index_bytes", "<i8"),  # 0 where absent
        ("column_index", "<i8"),  # -1 where absent
        ("column_index_bytes", "<i8"),  # 0 where absent
    ]
)
"""A column chunk as in the footer; encodings from NUMBERED on have no bit of their own: unusual."""

ABSENT = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
NUMBERED = 63
MAX_COUNT = 1 << 48
"""Upper bound of plausible counts of rows, values or bytes; sums of thousands of them still fit in
an int64."""
REQUIRED = sum(1 << field for field in (1, 2, 3, 4, 5, 6, 7, 9))
"""Required fields of ColumnMetaData."""

Bytes = npt.NDArray[np.uint8]
Chunks = npt.NDArray[np.void]


@kernel
def find_chunks(
    footer: Bytes, at: int, ordinal: int, num_leaves: int, path: Bytes, limit: int, found: Chunks
) -> bool:
    """Read the chunks of leaf number `ordinal` of `num_leaves`.
    False if anything is unusual or damaged.

    Args:
        footer: uint8 [n], FileMetaData.
        at: the position of its first row group.
        path: uint8 [m], the leaf's path_in_schema as expected in the footer; anything else is
            unusual.
        limit: the first byte of the footer in its file; all chunks and page indexes end before it.
        found: CHUNK_DTYPE [num_row_groups], filled.
    """
    data = pointer_at(footer.ctypes.data, len(footer))
    end = len(footer)
    name = pointer_at(path.ctypes.data, len(path))
    size = len(path)
    for i in range(len(found)):
        at = _row_group(data, at, end, ordinal, num_leaves, name, size, found[i])
        if at < 0 or not _is_sound(found[i], limit):
            return False
        found[i]["row_group"] = i
    return True


@device
def _is_sound(chunk: np.void, limit: int) -> bool:
    """Set `start`; whether counts are plausible and all bytes are before the limit."""
    data = chunk["data_page"]
    dictionary = chunk["dictionary_page"]
    start = dictionary if 0 < dictionary < data else data
    chunk["start"] = start
    if (
        min(
            chunk["num_rows"],
            chunk["num_values"],
            chunk["decoded_bytes"],
            chunk["stored_bytes"],
            data,
        )
        < 0
    ):
        return False
    if (
        max(
            chunk["num_rows"],
            chunk["num_values"],
            chunk["decoded_bytes"],
            chunk["stored_bytes"],
            data,
        )
        > MAX_COUNT
    ):
        return False
    if chunk["num_values"] and not 0 < start < start + chunk["stored_bytes"] <= limit:
        return False
    if chunk["null_count"] > MAX_COUNT:
        return False
    places = _is_before(chunk["offset_index"], chunk["offset_index_bytes"], limit)
    places &= _is_before(chunk["column_index"], chunk["column_index_bytes"], limit)
    if chunk["offset_index"] < 0:
        chunk["offset_index_bytes"] = 0
    if chunk["column_index"] < 0:
        chunk["column_index_bytes"] = 0
    return places


@device
def _is_before(offset: int, size: int, limit: int) -> bool:
    if not 0 <= size <= MAX_COUNT or offset > MAX_COUNT:
        return False
    return offset < 0 or size == 0 or offset + size <= limit


@device
def _row_group(
    data: Pointer,
    at: int,
    end: int,
    ordinal: int,
    num_leaves: int,
    path: Pointer,
    path_bytes: int,
    found: np.void,
) -> int:
    """Parse a RowGroup. Returns the position after it."""
    field = 0
    seen = 0
    while True:
        at, field, kind = next_field(data, at, end, field)
        if at < 0 or kind == 0:
            break
        if field == 1:
            if kind != LIST:
                return UNUSUAL
            at, count, element = list_header(data, at, end)
            if at < 0 or count != num_leaves or element != STRUCT:
                return UNUSUAL
            for leaf in range(num_leaves):
                is_chosen = leaf == ordinal
                at = (
                    _column_chunk(data, at, end, path, path_bytes, found)
                    if is_chosen
                    else skip(data, at, end, STRUCT)
                )
                if at < 0:
                    return at
            seen |= 1
        elif field == 3:
            at, found["num_rows"] = integer(data, at, end, kind)
            seen |= 2
        else:
            at = skip(data, at, end, kind)
        if at < 0:
            break
    return at if at < 0 or seen == 3 else UNUSUAL


@device
def _column_chunk(
    data: Pointer, at: int, end: int, path: Pointer, path_bytes: int, found: np.void
) -> int:
    """Parse a ColumnChunk: the position after it. Columns that are encrypted, or stored in another
    file, are unusual."""
    found["offset_index"] = found["column_index"] = -1
    found["offset_index_bytes"] = found["column_index_bytes"] = 0
    field = 0
    seen = False
    while True:
        at, field, kind = next_field(data, at, end, field)
        if at < 0 or kind == 0:
            break
        if field in (1, 8, 9):
            return UNUSUAL
        if field == 3:
            if kind != STRUCT:
                return UNUSUAL
            at = _meta_data(data, at, end, path, path_bytes, found)
            seen = True
        elif field == 4:
            at, found["offset_index"] = _count(data, at, end, kind)
        elif field == 5:
            at, found["offset_index_bytes"] = integer(data, at, end, kind)
        elif field == 6:
            at, found["column_index"] = _count(data, at, end, kind)
        elif field == 7:
            at, found["column_index_bytes"] = integer(data, at, end, kind)
        else:
            at = skip(data, at, end, kind)
        if at < 0:
            break
    return at if at < 0 or seen else UNUSUAL


@device
def _count(data: Pointer, at: int, end: int, kind: int) -> tuple[int, int]:
    """The position after an integer that cannot be negative, and the integer."""
    at, value = integer(data, at, end, kind)
    return (at if at < 0 or value >= 0 else UNUSUAL), value


@device
def _meta_data(
    data: Pointer, at: int, end: int, path: Pointer, path_bytes: int, found: np.void
) -> int:
    """Parse a ColumnMetaData: the position after it."""
    found["dictionary_page"] = 0
    _forget_statistics(found)
    found["page_encodings"] = ABSENT
    found["num_levels"] = -1
    found["all_levels"] = 0
    found["top_level"] = 0
    field = 0
    seen = 0
    while True:
        at, field, kind = next_field(data, at, end, field)
        if at < 0 or kind == 0:
            break
        if 1 <= field <= 9:
            seen |= 1 << field
        if field == 1:
            at, found["physical"] = integer(data, at, end, kind)
        elif field == 2:
            at, found["encodings"] = _encodings(data, at, end, kind)
        elif field == 3:
            at = _same(data, at, end, path, path_bytes) if kind == LIST else UNUSUAL
        elif field == 4:
            at, found["codec"] = integer(data, at, end, kind)
        elif field == 5:
            at, found["num_values"] = integer(data, at, end, kind)
        elif field == 6:
            at, found["decoded_bytes"] = integer(data, at, end, kind)
        elif field == 7:
            at, found["stored_bytes"] = integer(data, at, end, kind)
        elif field == 9:
            at, found["data_page"] = integer(data, at, end, kind)
        elif field == 11:
            at, found["dictionary_page"] = integer(data, at, end, kind)
        elif field == 12:
            at = _statistics(data, at, end, kind, found)
        elif field == 13:
            at, found["page_encodings"] = _page_encodings(data, at, end, kind)
        elif field == 16:
            at, found["num_levels"], found["all_levels"], found["top_level"] = _histogram(
                data, at, end, kind
            )
        else:
            at = skip(data, at, end, kind)
        if at < 0:
            break
    return at if at < 0 or seen & REQUIRED == REQUIRED else UNUSUAL


@device
def _same(data: Pointer, at: int, end: int, expected: Pointer, size: int) -> int:
    """The position after bytes that are the expected ones; others are unusual."""
    if size > end - at:
        return UNUSUAL
    for i in range(size):
        if data[at + i] != expected[i]:
            return UNUSUAL
    return at + size


@device
def _encodings(data: Pointer, at: int, end: int, kind: int) -> tuple[int, np.uint64]:
    """Parse a list of encodings: the position after it, and a bit for each."""
    bits = np.uint64(0)
    if kind != LIST:
        return UNUSUAL, bits
    at, count, element = list_header(data, at, end)
    for _ in range(count):
        if at < 0:
            break
        at, value = integer(data, at, end, element)
        if not 0 <= value < NUMBERED:
            return UNUSUAL, bits
        bits |= np.uint64(1) << np.uint64(value)
    return at, bits


@device
def _page_encodings(data: Pointer, at: int, end: int, kind: int) -> tuple[int, np.uint64]:
    """Parse a list of PageEncodingStats: the position after it,
    and a bit for each encoding that data pages have."""
    bits = np.uint64(0)
    if kind != LIST:
        return UNUSUAL, bits
    at, count, element = list_header(data, at, end)
    if at < 0 or (count and element != STRUCT):
        return UNUSUAL, bits
    for _ in range(count):
        page = encoding = np.int64(-1)
        field = 0
        while True:
            at, field, kind = next_field(data, at, end, field)
            if at < 0 or kind == 0:
                break
            if field == 1:
                at, page = integer(data, at, end, kind)
            elif field == 2:
                at, encoding = integer(data, at, end, kind)
            else:
                at = skip(data, at, end, kind)
            if at < 0:
                break
        if at < 0 or page < 0 or not 0 <= encoding < NUMBERED:
            return UNUSUAL, bits
        if page in (0, 3):
            bits |= np.uint64(1) << np.uint64(encoding)
    return at, bits


@device
def _forget_statistics(found: np.void) -> None:
    found["null_count"] = -1
    found["ranges"] = 0
    found["old_max"] = found["old_min"] = found["max_value"] = found["min_value"] = np.uint64(0)


@device
def _statistics(data: Pointer, at: int, end: int, kind: int, found: np.void) -> int:
    """Parse Statistics: the number of nulls, and the smallest and largest values as stored. Returns
    the position after it."""
    _forget_statistics(found)
    field = 0
    if kind != STRUCT:
        return UNUSUAL
    while True:
        at, field, kind = next_field(data, at, end, field)
        if at < 0 or kind == 0:
            return at
        if field == 3:
            at, found["null_count"] = _count(data, at, end, kind)
        elif field in (1, 2, 5, 6):
            found["ranges"] &= ~np.int64((1 << field) | (1 << (field + 8)))
            at, size, word = _value(data, at, end, kind)
            if size:
                found["ranges"] |= np.int64(1 << field if size == 4 else 1 << (field + 8))
            if field == 1:
                found["old_max"] = word
            elif field == 2:
                found["old_min"] = word
            elif field == 5:
                found["max_value"] = word
            else:
                found["min_value"] = word
        elif field in (7, 8):
            found["ranges"] &= ~np.int64(1 << field)
            if kind == FALSE:
                found["ranges"] |= np.int64(1 << field)
            at = skip(data, at, end, kind)
        else:
            at = skip(data, at, end, kind)
        if at < 0:
            return at


@device
def _value(data: Pointer, at: int, end: int, kind: int) -> tuple[int, int, np.uint64]:
    """The position after a field, and of an integer's 4 or 8 bytes their number and the integer; 0
    and 0 of anything else."""
    word = np.uint64(0)
    stop = skip(data, at, end, kind)
    if stop < 0 or kind != BINARY:
        return stop, np.int64(0), word
    at, size = varint(data, at, end)
    if size != 4 and size != 8:
        return stop, np.int64(0), word
    for i in range(stop - at):
        word |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return stop, np.int64(size), word


@device
def _histogram(data: Pointer, at: int, end: int, kind: int) -> tuple[int, int, int, int]:
    """Parse SizeStatistics. Returns the position after it, and of the definition levels' counts:
    how many (or -1), sum, last."""
    field = 0
    count = np.int64(-1)
    total = np.int64(0)
    last = np.int64(0)
    if kind != STRUCT:
        return UNUSUAL, count, total, last
    while True:
        at, field, kind = next_field(data, at, end, field)
        if at < 0 or kind == 0:
            return at, count, total, last
        if field == 3:
            if kind != LIST:
                return UNUSUAL, count, total, last
            at, count, element = list_header(data, at, end)
            total = np.int64(0)
            for _ in range(count):
                if at < 0:
                    break
                at, last = integer(data, at, end, element)
                total += last
        else:
            at = skip(data, at, end, kind)
        if at < 0:
            return at, count, total, last
