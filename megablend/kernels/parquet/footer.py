"""Parse the chunks of one column in a Parquet footer: one pass over thousands of row groups,
without running Python for each group.

Unusual or damaged metadata is left to `metadata.column_chunk`, which parses in Python and reports
what is wrong.

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
        ("encodings", "<u8"),  # encodings of values and levels in all pages, a bit each
        ("codec", "<i8"),
        ("num_values", "<i8"),
        ("decoded_bytes", "<i8"),
        ("stored_bytes", "<i8"),
        ("data_page", "<i8"),
        ("dictionary_page", "<i8"),  # 0 if absent
        ("null_count", "<i8"),  # -1 if absent
        # Which fields of Statistics are present: bit f if field f has 4 bytes, bit f + 8 if it has
        # 8 bytes; bits 7 and 8 if these fields, which are boolean, are false
        ("ranges", "<i8"),
        ("old_max", "<u8"),  # Statistics.max, its bytes as a little-endian integer; 0 if absent
        ("old_min", "<u8"),  # Statistics.min
        ("max_value", "<u8"),
        ("min_value", "<u8"),
        ("page_encodings", "<u8"),  # encodings of values in data pages, a bit each; ABSENT
        ("num_levels", "<i8"),  # length of the histogram of definition levels; -1 if absent
        # sum of the histogram: not num_values if the writer counted wrong, as ClickHouse 26 does
        ("all_levels", "<i8"),
        ("top_level", "<i8"),  # last count in the histogram
        ("offset_index", "<i8"),  # -1 if absent
        ("offset_index_bytes", "<i8"),  # 0 if absent
        ("column_index", "<i8"),  # -1 if absent
        ("column_index_bytes", "<i8"),  # 0 if absent
    ]
)
"""A column chunk as the footer describes it."""

ABSENT = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""The value of `page_encodings` if the writer stored none."""
NUMBERED = 63
"""Number of encodings that have a bit of their own. Files with other encodings are unusual."""
MAX_COUNT = 1 << 48
"""Upper bound of plausible counts of rows, values or bytes; sums of thousands of them still fit in
an int64."""
# Ids of fields of RowGroup, ColumnChunk, ColumnMetaData, PageEncodingStats, Statistics and
# SizeStatistics
ROW_GROUP_COLUMNS = 1
ROW_GROUP_NUM_ROWS = 3
CHUNK_FILE_PATH = 1
CHUNK_META_DATA = 3
CHUNK_OFFSET_INDEX = 4
CHUNK_OFFSET_INDEX_BYTES = 5
CHUNK_COLUMN_INDEX = 6
CHUNK_COLUMN_INDEX_BYTES = 7
CHUNK_CRYPTO = 8
CHUNK_ENCRYPTED_META_DATA = 9
META_TYPE = 1
META_ENCODINGS = 2
META_PATH = 3
META_CODEC = 4
META_NUM_VALUES = 5
META_DECODED_BYTES = 6
META_STORED_BYTES = 7
META_DATA_PAGE = 9
META_DICTIONARY_PAGE = 11
META_STATISTICS = 12
META_ENCODING_STATS = 13
META_SIZE_STATISTICS = 16
ENCODING_STATS_PAGE_TYPE = 1
ENCODING_STATS_ENCODING = 2
STATISTICS_MAX = 1
STATISTICS_MIN = 2
STATISTICS_NULL_COUNT = 3
STATISTICS_MAX_VALUE = 5
STATISTICS_MIN_VALUE = 6
STATISTICS_IS_MAX_EXACT = 7
STATISTICS_IS_MIN_EXACT = 8
SIZES_DEF_LEVELS = 3
REQUIRED = sum(
    1 << field
    for field in (
        META_TYPE,
        META_ENCODINGS,
        META_PATH,
        META_CODEC,
        META_NUM_VALUES,
        META_DECODED_BYTES,
        META_STORED_BYTES,
        META_DATA_PAGE,
    )
)
"""Bits of the required fields of ColumnMetaData."""

Bytes = npt.NDArray[np.uint8]
Chunks = npt.NDArray[np.void]


@kernel
def find_chunks(
    footer: Bytes,
    position: int,
    ordinal: int,
    num_leaves: int,
    path: Bytes,
    limit: int,
    found: Chunks,
) -> bool:
    """Parse the chunks of leaf number `ordinal` of `num_leaves`. Returns False if anything is
    unusual or damaged.

    Args:
        footer: uint8 [n], the encoded FileMetaData.
        position: position in `footer` of its first row group.
        path: uint8 [m], the leaf's path_in_schema, encoded; a different path is unusual.
        limit: first byte of the footer in its file; all chunks and page indexes end before it.
        found: CHUNK_DTYPE [num_row_groups], filled.
    """
    data = pointer_at(footer.ctypes.data, len(footer))
    end = len(footer)
    name = pointer_at(path.ctypes.data, len(path))
    size = len(path)
    for i in range(len(found)):
        position = _row_group(data, position, end, ordinal, num_leaves, name, size, found[i])
        if position < 0 or not _is_sound(found[i], limit):
            return False
        found[i]["row_group"] = i
    return True


@device
def _is_sound(chunk: np.void, limit: int) -> bool:
    """Set the field `start` of a chunk. Returns whether the chunk's counts are plausible, and all
    its bytes are before the limit."""
    data = chunk["data_page"]
    dictionary = chunk["dictionary_page"]
    start = dictionary if 0 < dictionary < data else data
    chunk["start"] = start
    sizes = chunk["decoded_bytes"], chunk["stored_bytes"]
    for count in (chunk["num_rows"], chunk["num_values"], *sizes, data):
        if not 0 <= count <= MAX_COUNT:
            return False
    if chunk["num_values"] and not 0 < start < start + chunk["stored_bytes"] <= limit:
        return False
    if chunk["null_count"] > MAX_COUNT:
        return False
    are_before = _is_before(chunk["offset_index"], chunk["offset_index_bytes"], limit)
    are_before &= _is_before(chunk["column_index"], chunk["column_index_bytes"], limit)
    if chunk["offset_index"] < 0:
        chunk["offset_index_bytes"] = 0
    if chunk["column_index"] < 0:
        chunk["column_index_bytes"] = 0
    return are_before


@device
def _is_before(offset: int, size: int, limit: int) -> bool:
    """Return whether a page index is plausible and before the limit, or does not exist (`offset` is
    negative)."""
    if not 0 <= size <= MAX_COUNT or offset > MAX_COUNT:
        return False
    return offset < 0 or size == 0 or offset + size <= limit


@device
def _row_group(
    data: Pointer,
    position: int,
    end: int,
    ordinal: int,
    num_leaves: int,
    path: Pointer,
    path_bytes: int,
    found: np.void,
) -> int:
    """Parse a RowGroup, and fill `found` with the chunk of a column. Returns the position after
    it."""
    field = 0
    seen = 0
    while True:
        position, field, kind = next_field(data, position, end, field)
        if position < 0 or kind == 0:
            break
        if field == ROW_GROUP_COLUMNS:
            if kind != LIST:
                return UNUSUAL
            position, count, element = list_header(data, position, end)
            if position < 0 or count != num_leaves or element != STRUCT:
                return UNUSUAL
            for leaf in range(num_leaves):
                if leaf == ordinal:
                    position = _column_chunk(data, position, end, path, path_bytes, found)
                else:
                    position = skip(data, position, end, STRUCT)
                if position < 0:
                    return position
            seen |= 1 << ROW_GROUP_COLUMNS
        elif field == ROW_GROUP_NUM_ROWS:
            position, found["num_rows"] = integer(data, position, end, kind)
            seen |= 1 << ROW_GROUP_NUM_ROWS
        else:
            position = skip(data, position, end, kind)
        if position < 0:
            break
    required = 1 << ROW_GROUP_COLUMNS | 1 << ROW_GROUP_NUM_ROWS
    return position if position < 0 or seen == required else UNUSUAL


@device
def _column_chunk(
    data: Pointer, position: int, end: int, path: Pointer, path_bytes: int, found: np.void
) -> int:
    """Parse a ColumnChunk. Returns the position after it. A chunk that is encrypted, or stored in
    another file, is unusual."""
    found["offset_index"] = found["column_index"] = -1
    found["offset_index_bytes"] = found["column_index_bytes"] = 0
    field = 0
    seen = False
    while True:
        position, field, kind = next_field(data, position, end, field)
        if position < 0 or kind == 0:
            break
        if field in (CHUNK_FILE_PATH, CHUNK_CRYPTO, CHUNK_ENCRYPTED_META_DATA):
            return UNUSUAL
        if field == CHUNK_META_DATA:
            if kind != STRUCT:
                return UNUSUAL
            position = _meta_data(data, position, end, path, path_bytes, found)
            seen = True
        elif field == CHUNK_OFFSET_INDEX:
            position, found["offset_index"] = _count(data, position, end, kind)
        elif field == CHUNK_OFFSET_INDEX_BYTES:
            position, found["offset_index_bytes"] = integer(data, position, end, kind)
        elif field == CHUNK_COLUMN_INDEX:
            position, found["column_index"] = _count(data, position, end, kind)
        elif field == CHUNK_COLUMN_INDEX_BYTES:
            position, found["column_index_bytes"] = integer(data, position, end, kind)
        else:
            position = skip(data, position, end, kind)
        if position < 0:
            break
    return position if position < 0 or seen else UNUSUAL


@device
def _count(data: Pointer, position: int, end: int, kind: int) -> tuple[int, int]:
    """Read an integer; a negative one is unusual. Returns the position after it, and the
    integer."""
    position, value = integer(data, position, end, kind)
    return (position if position < 0 or value >= 0 else UNUSUAL), value


@device
def _meta_data(
    data: Pointer, position: int, end: int, path: Pointer, path_bytes: int, found: np.void
) -> int:
    """Parse a ColumnMetaData. Returns the position after it."""
    found["dictionary_page"] = 0
    _clear_statistics(found)
    found["page_encodings"] = ABSENT
    found["num_levels"] = -1
    found["all_levels"] = 0
    found["top_level"] = 0
    field = 0
    seen = 0
    while True:
        position, field, kind = next_field(data, position, end, field)
        if position < 0 or kind == 0:
            break
        if META_TYPE <= field <= META_DATA_PAGE:
            seen |= 1 << field
        if field == META_TYPE:
            position, found["physical"] = integer(data, position, end, kind)
        elif field == META_ENCODINGS:
            position, found["encodings"] = _encodings(data, position, end, kind)
        elif field == META_PATH:
            position = _expect(data, position, end, path, path_bytes) if kind == LIST else UNUSUAL
        elif field == META_CODEC:
            position, found["codec"] = integer(data, position, end, kind)
        elif field == META_NUM_VALUES:
            position, found["num_values"] = integer(data, position, end, kind)
        elif field == META_DECODED_BYTES:
            position, found["decoded_bytes"] = integer(data, position, end, kind)
        elif field == META_STORED_BYTES:
            position, found["stored_bytes"] = integer(data, position, end, kind)
        elif field == META_DATA_PAGE:
            position, found["data_page"] = integer(data, position, end, kind)
        elif field == META_DICTIONARY_PAGE:
            position, found["dictionary_page"] = integer(data, position, end, kind)
        elif field == META_STATISTICS:
            position = _statistics(data, position, end, kind, found)
        elif field == META_ENCODING_STATS:
            position, found["page_encodings"] = _page_encodings(data, position, end, kind)
        elif field == META_SIZE_STATISTICS:
            position, found["num_levels"], found["all_levels"], found["top_level"] = _histogram(
                data, position, end, kind
            )
        else:
            position = skip(data, position, end, kind)
        if position < 0:
            break
    return position if position < 0 or seen & REQUIRED == REQUIRED else UNUSUAL


@device
def _expect(data: Pointer, position: int, end: int, expected: Pointer, size: int) -> int:
    """Check that `size` bytes equal the expected ones; if not, they are unusual. Returns the
    position after the bytes."""
    if size > end - position:
        return UNUSUAL
    for i in range(size):
        if data[position + i] != expected[i]:
            return UNUSUAL
    return position + size


@device
def _encodings(data: Pointer, position: int, end: int, kind: int) -> tuple[int, np.uint64]:
    """Parse a list of encodings. Returns the position after it, and the set of encodings as
    bits."""
    bits = np.uint64(0)
    if kind != LIST:
        return UNUSUAL, bits
    position, count, element = list_header(data, position, end)
    for _ in range(count):
        if position < 0:
            break
        position, value = integer(data, position, end, element)
        if not 0 <= value < NUMBERED:
            return UNUSUAL, bits
        bits |= np.uint64(1) << np.uint64(value)
    return position, bits


@device
def _page_encodings(data: Pointer, position: int, end: int, kind: int) -> tuple[int, np.uint64]:
    """Parse a list of PageEncodingStats. Returns the position after it, and the set of the data
    pages' encodings as bits."""
    bits = np.uint64(0)
    if kind != LIST:
        return UNUSUAL, bits
    position, count, element = list_header(data, position, end)
    if position < 0 or (count and element != STRUCT):
        return UNUSUAL, bits
    for _ in range(count):
        page_type = encoding = np.int64(-1)
        field = 0
        while True:
            position, field, kind = next_field(data, position, end, field)
            if position < 0 or kind == 0:
                break
            if field == ENCODING_STATS_PAGE_TYPE:
                position, page_type = integer(data, position, end, kind)
            elif field == ENCODING_STATS_ENCODING:
                position, encoding = integer(data, position, end, kind)
            else:
                position = skip(data, position, end, kind)
            if position < 0:
                break
        if position < 0 or page_type < 0 or not 0 <= encoding < NUMBERED:
            return UNUSUAL, bits
        # Data pages, V1 and V2
        if page_type in (0, 3):
            bits |= np.uint64(1) << np.uint64(encoding)
    return position, bits


@device
def _clear_statistics(found: np.void) -> None:
    found["null_count"] = -1
    found["ranges"] = 0
    found["old_max"] = found["old_min"] = found["max_value"] = found["min_value"] = np.uint64(0)


@device
def _statistics(data: Pointer, position: int, end: int, kind: int, found: np.void) -> int:
    """Parse Statistics: the number of nulls, and the smallest and the largest value. Returns the
    position after it."""
    _clear_statistics(found)
    field = 0
    if kind != STRUCT:
        return UNUSUAL
    while True:
        position, field, kind = next_field(data, position, end, field)
        if position < 0 or kind == 0:
            return position
        if field == STATISTICS_NULL_COUNT:
            position, found["null_count"] = _count(data, position, end, kind)
        elif field in (STATISTICS_MAX, STATISTICS_MIN, STATISTICS_MAX_VALUE, STATISTICS_MIN_VALUE):
            found["ranges"] &= ~np.int64((1 << field) | (1 << (field + 8)))
            position, size, word = _value(data, position, end, kind)
            if size:
                found["ranges"] |= np.int64(1 << field if size == 4 else 1 << (field + 8))
            if field == STATISTICS_MAX:
                found["old_max"] = word
            elif field == STATISTICS_MIN:
                found["old_min"] = word
            elif field == STATISTICS_MAX_VALUE:
                found["max_value"] = word
            else:
                found["min_value"] = word
        elif field in (STATISTICS_IS_MAX_EXACT, STATISTICS_IS_MIN_EXACT):
            found["ranges"] &= ~np.int64(1 << field)
            if kind == FALSE:
                found["ranges"] |= np.int64(1 << field)
            position = skip(data, position, end, kind)
        else:
            position = skip(data, position, end, kind)
        if position < 0:
            return position


@device
def _value(data: Pointer, position: int, end: int, kind: int) -> tuple[int, int, np.uint64]:
    """Read a binary field that holds an integer. Returns the position after it, the size of the
    integer in bytes (4 or 8), and the integer. For any other field, size and integer are 0."""
    word = np.uint64(0)
    stop = skip(data, position, end, kind)
    if stop < 0 or kind != BINARY:
        return stop, np.int64(0), word
    position, size = varint(data, position, end)
    if size != 4 and size != 8:
        return stop, np.int64(0), word
    for i in range(stop - position):
        word |= np.uint64(data[position + i]) << np.uint64(8 * i)
    return stop, np.int64(size), word


@device
def _histogram(data: Pointer, position: int, end: int, kind: int) -> tuple[int, int, int, int]:
    """Parse SizeStatistics. Returns the position after it; and the length of the histogram of
    definition levels (-1 if absent), its sum, and its last count."""
    field = 0
    count = np.int64(-1)
    total = np.int64(0)
    last = np.int64(0)
    if kind != STRUCT:
        return UNUSUAL, count, total, last
    while True:
        position, field, kind = next_field(data, position, end, field)
        if position < 0 or kind == 0:
            return position, count, total, last
        if field == SIZES_DEF_LEVELS:
            if kind != LIST:
                return UNUSUAL, count, total, last
            position, count, element = list_header(data, position, end)
            total = np.int64(0)
            for _ in range(count):
                if position < 0:
                    break
                position, last = integer(data, position, end, element)
                total += last
        else:
            position = skip(data, position, end, kind)
        if position < 0:
            return position, count, total, last
