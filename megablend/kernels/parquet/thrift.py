"""Thrift's compact protocol in kernels: read integers and fields, and skip values.

Bytes are read from a pointer `data`, from index `position` on, before index `end`. A returned
position below 0 is an error code, TRUNCATED or UNUSUAL. Some kernels leave both to
`formats.parquet.metadata.thrift`, which parses in Python; others report them as damage.

Source: Thrift "compact protocol" specification (thrift/doc/specs/thrift-compact-protocol.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.intrinsics import Pointer, pointer_at
from megablend.jit import device, kernel

TRUNCATED = -1
"""Error code: the bytes end too early."""
UNUSUAL = -2
"""Error code: the bytes do not occur in Parquet's metadata."""
MAX_DEPTH = 16
"""Maximum nesting depth of values that are skipped."""
FIELDS = -1
"""A special count of elements, for a struct: the number of its fields is not stored."""

TRUE, FALSE, I8, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
"""Wire types."""


@device
def varint(data: Pointer, position: int, end: int) -> tuple[int, np.uint64]:
    """Read an unsigned integer. Returns the position after it, and the integer."""
    value = np.uint64(0)
    shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= np.uint64(byte & 0x7F) << np.uint64(shift)
        if byte < 0x80:
            return position, value
        shift += 7
        if shift > 63:
            return UNUSUAL, value
    return TRUNCATED, value


@device
def integer(data: Pointer, position: int, end: int, kind: int) -> tuple[int, int]:
    """Read an integer of any kind; a value of another kind is UNUSUAL. Returns the position after
    it, and the integer."""
    if kind == I8:
        return (
            (position + 1, np.int64(np.int8(data[position])))
            if position < end
            else (TRUNCATED, np.int64(0))
        )
    if not I16 <= kind <= I64:
        return UNUSUAL, np.int64(0)
    position, value = varint(data, position, end)
    return position, np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))


@device
def next_field(data: Pointer, position: int, end: int, field: int) -> tuple[int, int, int]:
    """Read the header of a field, given the id of the previous field. Returns the position after
    it, the field's id, and its kind; kind 0 at the end of the struct."""
    if position >= end:
        return TRUNCATED, field, 0
    header = int(data[position])
    position += 1
    if header >> 4:
        if header & 15 == 0:
            return UNUSUAL, field, 0
        return position, field + (header >> 4), header & 15
    if header:
        position, number = integer(data, position, end, I16)
        return position, np.int64(number), header & 15
    return position, field, 0


@device
def list_header(data: Pointer, position: int, end: int) -> tuple[int, int, int]:
    """Read the header of a list. Returns the position after it; the number of elements, which is at
    most the number of bytes left; and their kind."""
    if position >= end:
        return TRUNCATED, 0, 0
    header = int(data[position])
    position += 1
    count = np.int64(header >> 4)
    if count == 15:
        position, long = varint(data, position, end)
        if position < 0:
            return position, 0, 0
        if long > np.uint64(end):
            return TRUNCATED, 0, 0
        count = np.int64(long)
    if count > end - position:
        return TRUNCATED, 0, 0
    return position, count, header & 15


@device
def skip(data: Pointer, position: int, end: int, kind: int) -> int:
    """Skip the value of a field. Returns the position after it."""
    if kind not in (LIST, SET, STRUCT):
        return _skip_plain(data, position, end, kind)
    count = np.int64(1)
    if kind != STRUCT:
        position, count, kind = list_header(data, position, end)
        # A boolean in a list takes a byte
        if kind in (TRUE, FALSE):
            kind = I8
        if position >= 0 and kind not in (LIST, SET, STRUCT):
            for _ in range(count):
                position = _skip_plain(data, position, end, kind)
                if position < 0:
                    break
            return position
    return skip_nested(data, position, end, kind, count)


@device
def _skip_plain(data: Pointer, position: int, end: int, kind: int) -> int:
    """Skip the value of a field that contains no other values. Returns the position after it."""
    if kind in (TRUE, FALSE):
        return position
    if I16 <= kind <= I64:
        return varint(data, position, end)[0]
    size = np.uint64(1)
    if kind == BINARY:
        position, size = varint(data, position, end)
    elif kind == DOUBLE:
        size = np.uint64(8)
    elif kind != I8:
        return UNUSUAL
    if position >= 0 and size > np.uint64(end - position):
        return TRUNCATED
    return position + np.int64(size) if position >= 0 else position


@device
def skip_nested(data: Pointer, position: int, end: int, kind: int, count: int) -> int:
    """Skip `count` values of a kind. Returns the position after them. Not recursive, since numba
    0.68 crashes when it loads a recursive function from its cache."""
    # For each depth: the number of values left, or FIELDS; and their kind
    left = np.zeros(MAX_DEPTH, np.int64)
    kinds = np.zeros(MAX_DEPTH, np.int64)
    depth = 0
    left[0] = count
    kinds[0] = kind
    while position >= 0:
        # A list ends
        if left[depth] == 0:
            if depth == 0:
                break
            depth -= 1
            continue
        value = kinds[depth]
        if left[depth] == FIELDS:
            position, _, value = next_field(data, position, end, 0)
            if position < 0:
                break
            if value == 0:
                depth -= 1
                continue
        else:
            left[depth] -= 1
            # A boolean in a list takes a byte
            if value in (TRUE, FALSE):
                value = I8
        if value in (LIST, SET, STRUCT):
            depth += 1
            if depth == MAX_DEPTH:
                return UNUSUAL
            left[depth] = FIELDS
            if value != STRUCT:
                position, left[depth], kinds[depth] = list_header(data, position, end)
        else:
            position = _skip_plain(data, position, end, value)
    return position


@kernel
def skip_structs(data: npt.NDArray[np.uint8], position: int, count: int) -> int:
    """Return the position after `count` structs of a list, the first of which begins at
    data[position]."""
    return skip_nested(pointer_at(data.ctypes.data, len(data)), position, len(data), STRUCT, count)
