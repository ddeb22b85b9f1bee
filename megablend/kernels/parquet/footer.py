"""Parse the chunks of one column in a Parquet footer: one pass over thousands of row groups,
without running Python for each group.

One function reads structs of any kind: a table says which fields are kept, and where.
`metadata.column_chunk` reports what is wrong.

Source: parquet-format, parquet.thrift (RowGroup, ColumnChunk, ColumnMetaData, Statistics,
    PageEncodingStats, SizeStatistics).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.intrinsics import Pointer, pointer_at
from megablend.jit import device, kernel
from megablend.kernels.parquet.thrift import (
    BINARY,
    FALSE,
    I8,
    I64,
    LIST,
    STRUCT,
    UNUSUAL,
    integer,
    list_header,
    next_field,
    skip,
    skip_nested,
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
        ("page_encodings", "<u8"),  # encodings of data pages' values, a bit each; all if absent
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
"""A column chunk as the footer describes it. All fields have 8 bytes: the kernel fills a row of
int64."""

NUMBERED = 63
"""Number of encodings that have a bit of their own; the last bit stands for all others."""
MAX_COUNT = 1 << 48
"""Upper bound of plausible counts of rows, values or bytes; sums of thousands of them still fit in
an int64."""

ROW_GROUP, CHUNK, META_DATA, STATISTICS, SIZES, PAGE_ENCODINGS = range(6)
"""Numbers of structs."""
SLOTS = (
    *(CHUNK_DTYPE.names or ()),
    "columns",
    "path",
    "levels",
    "max_exact",
    "min_exact",
    "page_type",
    "page_encoding",
    "file_path",
    "crypto_metadata",
    "encrypted_metadata",
    "meta_data",
    "statistics",
    "sizes",
    "other",
)
"""Names of the values that are kept of a row group and its chunk: those of CHUNK_DTYPE, and others
that only the kernel needs."""
_FIELDS: dict[int, dict[int, str]] = {
    ROW_GROUP: {1: "columns", 3: "num_rows"},
    CHUNK: {
        1: "file_path",
        3: "meta_data",
        4: "offset_index",
        5: "offset_index_bytes",
        6: "column_index",
        7: "column_index_bytes",
        8: "crypto_metadata",
        9: "encrypted_metadata",
    },
    META_DATA: {
        1: "physical",
        2: "encodings",
        3: "path",
        4: "codec",
        5: "num_values",
        6: "decoded_bytes",
        7: "stored_bytes",
        9: "data_page",
        11: "dictionary_page",
        12: "statistics",
        13: "page_encodings",
        16: "sizes",
    },
    STATISTICS: {
        1: "old_max",
        2: "old_min",
        3: "null_count",
        5: "max_value",
        6: "min_value",
        7: "max_exact",
        8: "min_exact",
    },
    SIZES: {3: "levels"},
    PAGE_ENCODINGS: {1: "page_type", 2: "page_encoding"},
}
"""The name of each field that is kept, by struct and id."""
_STRUCTS = {"columns": CHUNK, "meta_data": META_DATA, "statistics": STATISTICS, "sizes": SIZES}
"""The values that are structs, or a list of them, and whose fields are kept, too."""
_LISTS = ("columns", "path", "encodings", "page_encodings", "levels")
_ANY = ("old_max", "old_min", "max_value", "min_value", "max_exact", "min_exact", "other")
_REQUIRED = (
    "columns",
    "num_rows",
    "meta_data",
    "physical",
    "encodings",
    "path",
    "codec",
    "num_values",
    "decoded_bytes",
    "stored_bytes",
    "data_page",
)
COUNTS = (
    "num_rows",
    "num_values",
    "decoded_bytes",
    "stored_bytes",
    "data_page",
    "null_count",
    "offset_index",
    "offset_index_bytes",
    "column_index",
    "column_index_bytes",
)
"""Integers from 0 to MAX_COUNT."""
_REFUSED = ("crypto_metadata", "encrypted_metadata", "file_path")
"""Values that make a chunk unreadable."""
_MISSING, _INTEGER, _LIST, _STRUCT, _OTHER = (1 << bit for bit in range(5))
"""Forms of values, a bit each."""


def _slot(name: str) -> int:
    return SLOTS.index(name)


def _allowed(name: str) -> int:
    """Return the forms that a value may have."""
    if name in _REFUSED:
        return _MISSING
    form = _INTEGER
    if name in _LISTS:
        form = _LIST
    elif name in _STRUCTS:
        form = _STRUCT
    elif name in _ANY:
        form = _INTEGER | _LIST | _STRUCT | _OTHER
    return form if name in _REQUIRED else form | _MISSING


NUM_CHUNK_SLOTS = CHUNK_DTYPE.itemsize // 8
_OTHER_SLOT = _slot("other")
_SLOT_OF = np.full((len(_FIELDS), 17), _OTHER_SLOT)
for _struct, _names in _FIELDS.items():
    for _field, _name in _names.items():
        _SLOT_OF[_struct, _field] = _slot(_name)
_STRUCT_OF = np.array([_STRUCTS.get(name, -1) for name in SLOTS])
_ALLOWED = np.array([_allowed(name) for name in SLOTS])
# The values whose problem explains those of others come first
_EXPLAINS = ("columns", *_REFUSED, "meta_data")
_CHECKED = np.array([_slot(name) for name in dict.fromkeys((*_EXPLAINS, *SLOTS))])
_IS_COUNT = np.array([name in COUNTS for name in SLOTS])
_DEFAULTS = np.zeros(len(SLOTS), np.int64)
for _name in ("null_count", "page_encodings", "num_levels", "offset_index", "column_index"):
    _DEFAULTS[_slot(_name)] = -1
_COLUMNS = _slot("columns")
_PATH = _slot("path")
_FILE_PATH = _slot("file_path")
_ENCODINGS = _slot("encodings")
_PAGE_ENCODINGS = _slot("page_encodings")
_PAGE_TYPE = _slot("page_type")
_PAGE_ENCODING = _slot("page_encoding")
_LEVELS = _slot("levels")
_NUM_LEVELS = _slot("num_levels")
_RANGES = _slot("ranges")
_MAX_EXACT = _slot("max_exact")
_OLD_MAX = _slot("old_max")
_VALUE_FIELDS = np.array([1, 2, 5, 6])
"""Ids of the fields of Statistics that hold values. Their slots are neighbours."""

_STACK = 8
"""Number of values after the slots that hold the structs being read, and their last fields."""

Bytes = npt.NDArray[np.uint8]


@kernel
def find_chunks(
    footer: Bytes,
    position: int,
    ordinal: int,
    num_leaves: int,
    path: Bytes,
    path_length: int,
    found: Int64s,
) -> tuple[int, int, int, int]:
    """Parse the chunks of leaf number `ordinal` of `num_leaves`.

    Args:
        footer: uint8 [n], the encoded FileMetaData.
        position: position in `footer` of its first row group.
        path: uint8 [m], the `path_length` names of the leaf's path_in_schema, encoded.
        found: int64 [num_row_groups, NUM_CHUNK_SLOTS], filled with rows of CHUNK_DTYPE, but for
            their field `start`.

    Returns: the number of the first row group that is wrong, num_row_groups if none is; the slot of
        the value that is missing, of another form, out of bounds or not the expected one, -1 if the
        bytes cannot be read; its kind, 0 if it is missing; and the value.
    """
    data = pointer_at(footer.ctypes.data, len(footer))
    end = len(footer)
    values = np.empty(len(_DEFAULTS) + _STACK, np.int64)
    kinds = np.empty(len(_DEFAULTS), np.int64)
    for i in range(len(found)):
        values[: len(_DEFAULTS)] = _DEFAULTS
        values[0] = i
        kinds[:] = 0
        position = _read_fields(data, position, end, ROW_GROUP, ordinal, num_leaves, values, kinds)
        slot = -1
        if position >= 0:
            slot = _find_problem(values, kinds)
            if slot < 0 and not _is_at(data, values[_PATH], end, path, path_length):
                slot = _PATH
            if slot < 0:
                slot = _fill_sets(data, end, values, kinds)
            if slot < 0:
                _fill_statistics(data, end, values, kinds)
        elif kinds[_COLUMNS] == LIST and values[_COLUMNS] != num_leaves:
            slot = _COLUMNS
        if position < 0 or slot >= 0:
            return i, slot, kinds[slot], values[slot]
        found[i] = values[:NUM_CHUNK_SLOTS]
    return len(found), 0, 0, 0


@device
def _read_fields(
    data: Pointer,
    position: int,
    end: int,
    struct: int,
    ordinal: int,
    num_leaves: int,
    values: Int64s,
    kinds: Int64s,
) -> int:
    """Read a struct, and the structs in it whose fields are kept; of the columns of a row group,
    the one with number `ordinal`. A field that occurs twice is unusual. Returns the position after
    the struct.

    Args:
        values: int64 [num_slots + _STACK]: an integer is stored in its slot; of any other value,
            the position at which it begins; of columns, their number.
        kinds: int64 [num_slots]: the kind of each value, 0 if it is absent.
    """
    # For each depth: the struct, and the id of its last field. Not recursive, see `skip_nested`
    structs = values[len(kinds) : len(kinds) + _STACK // 2]
    fields = values[len(kinds) + _STACK // 2 :]
    depth = 0
    structs[0] = struct
    fields[0] = 0
    while position >= 0:
        position, fields[depth], kind = next_field(data, position, end, fields[depth])
        if position < 0:
            break
        if kind == 0:
            if depth == 0:
                break
            depth -= 1
            if structs[depth + 1] == CHUNK:
                position = skip_nested(data, position, end, STRUCT, num_leaves - ordinal - 1)
            continue
        slot = _OTHER_SLOT
        if 0 <= fields[depth] < _SLOT_OF.shape[1]:
            slot = _SLOT_OF[structs[depth], fields[depth]]
        if kinds[slot] and slot != _OTHER_SLOT:
            return UNUSUAL
        kinds[slot] = kind
        values[slot] = position
        if I8 <= kind <= I64:
            position, values[slot] = integer(data, position, end, kind)
            continue
        if slot == _COLUMNS and kind == LIST:
            position, values[slot], element = list_header(data, position, end)
            if position < 0 or values[slot] != num_leaves or element != STRUCT:
                return UNUSUAL
            position = skip_nested(data, position, end, STRUCT, ordinal)
        if _STRUCT_OF[slot] >= 0 and (kind == STRUCT or slot == _COLUMNS):
            depth += 1
            structs[depth] = _STRUCT_OF[slot]
            fields[depth] = 0
        else:
            position = skip(data, position, end, kind)
            # An empty file_path counts as missing: fastparquet writes it
            is_text = position >= 0 and kind == BINARY
            if slot == _FILE_PATH and is_text and data[values[slot]] == 0:
                kinds[slot] = 0
    return position


@device
def _find_problem(values: Int64s, kinds: Int64s) -> int:
    """Return the slot of the first value that has not an allowed form or is not a plausible count;
    -1 if there is none."""
    for checked in _CHECKED:
        slot = int(checked)
        kind = kinds[slot]
        form = _OTHER
        if kind == 0:
            form = _MISSING
        elif I8 <= kind <= I64:
            form = _INTEGER
        elif kind == LIST:
            form = _LIST
        elif kind == STRUCT:
            form = _STRUCT
        if not _ALLOWED[slot] & form:
            return slot
        if kind and _IS_COUNT[slot] and not 0 <= values[slot] <= MAX_COUNT:
            return slot
    return -1


@device
def _is_at(data: Pointer, position: int, end: int, expected: Bytes, length: int) -> bool:
    """Return whether a list of `length` names is at a position, given its encoded elements."""
    position, count, element = list_header(data, position, end)
    if position < 0 or count != length or element != BINARY or len(expected) > end - position:
        return False
    is_same = True
    for i in range(len(expected)):
        is_same &= data[position + i] == expected[i]
    return is_same


@device
def _fill_sets(data: Pointer, end: int, values: Int64s, kinds: Int64s) -> int:
    """Replace the positions of lists by what is kept of them: sets of encodings as bits; length,
    sum and last count of the histogram of levels. Returns the slot of a list that cannot be read,
    -1 if there is none."""
    count, values[_ENCODINGS], _, _ = _integers(data, values[_ENCODINGS], end)
    if count < 0:
        return _ENCODINGS
    if kinds[_PAGE_ENCODINGS]:
        position = values[_PAGE_ENCODINGS]
        count, values[_PAGE_ENCODINGS] = _page_encodings(data, position, end, values, kinds)
        if count < 0:
            return _PAGE_ENCODINGS
    if kinds[_LEVELS]:
        count, _, total, last = _integers(data, values[_LEVELS], end)
        values[_NUM_LEVELS] = count
        values[_NUM_LEVELS + 1] = total
        values[_NUM_LEVELS + 2] = last
    return _LEVELS if count < 0 else -1


@device
def _integers(data: Pointer, position: int, end: int) -> tuple[int, int, int, int]:
    """Read a list of integers. Returns their number, UNUSUAL if they cannot be read; the set of
    them as bits; their sum; and the last one."""
    bits = total = last = np.int64(0)
    position, count, element = list_header(data, position, end)
    for _ in range(count):
        if position >= 0:
            position, last = integer(data, position, end, element)
        total += last
        bits |= _bit(last)
    return (count if position >= 0 else UNUSUAL), bits, total, last


@device
def _bit(encoding: int) -> int:
    """Return the bit of an encoding."""
    return int(np.int64(1) << np.int64(encoding if 0 <= encoding < NUMBERED else NUMBERED))


@device
def _page_encodings(
    data: Pointer, position: int, end: int, values: Int64s, kinds: Int64s
) -> tuple[int, int]:
    """Read a list of PageEncodingStats. Returns their number, UNUSUAL if they cannot be read; and
    the set of the data pages' encodings as bits."""
    bits = np.int64(0)
    position, count, element = list_header(data, position, end)
    if position < 0 or (count and element != STRUCT):
        return UNUSUAL, bits
    for _ in range(count):
        kinds[_PAGE_TYPE] = kinds[_PAGE_ENCODING] = 0
        position = _read_fields(data, position, end, PAGE_ENCODINGS, 0, 0, values, kinds)
        for slot in (_PAGE_TYPE, _PAGE_ENCODING):
            if position < 0 or not I8 <= kinds[slot] <= I64:
                return UNUSUAL, bits
        # Data pages, V1 and V2
        if values[_PAGE_TYPE] in (0, 3):
            bits |= _bit(values[_PAGE_ENCODING])
    return count, bits


@device
def _fill_statistics(data: Pointer, end: int, values: Int64s, kinds: Int64s) -> None:
    """Replace the positions of the smallest and largest values by the values, and set `ranges`."""
    for i in range(len(_VALUE_FIELDS)):
        slot = _OLD_MAX + i
        size = np.uint64(0)
        position = values[slot]
        values[slot] = 0
        if kinds[slot] == BINARY:
            position, size = varint(data, position, end)
        if size == 4 or size == 8:
            word = np.uint64(0)
            for j in range(np.int64(size)):
                word |= np.uint64(data[position + j]) << np.uint64(8 * j)
            values[slot] = np.int64(word)
            values[_RANGES] |= 1 << (_VALUE_FIELDS[i] + (0 if size == 4 else 8))
    # is_max_value_exact and is_min_value_exact, fields 7 and 8
    for i in range(2):
        if kinds[_MAX_EXACT + i] == FALSE:
            values[_RANGES] |= 1 << (7 + i)
