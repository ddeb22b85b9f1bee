"""Thrift's compact protocol in kernels: integers, fields, and skipping values.

Bytes are read from a pointer `data`, at index `at`, before index `end`. A position below
0 is an error code: TRUNCATED if the bytes end too early, UNUSUAL if they do not occur in
Parquet's metadata. Kernels leave both to `formats.parquet.metadata.thrift`, which parses in
Python and reports what is wrong.

Source: Thrift "compact protocol" specification (thrift/doc/specs/thrift-compact-protocol.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.intrinsics import Pointer, pointer_at
from megablend.jit import device, kernel

TRUNCATED = -1
UNUSUAL = -2
MAX_DEPTH = 16
FIELDS = -1
"""In place of a number of elements: fields, until their struct ends."""

TRUE, FALSE, I8, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
"""Wire types."""


@device
def varint(data: Pointer, at: int, end: int) -> tuple[int, np.uint64]:
    """The position after an unsigned integer, and the integer."""
    value = np.uint64(0)
    shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= np.uint64(byte & 0x7F) << np.uint64(shift)
        if byte < 0x80:
            return at, value
        shift += 7
        if shift > 63:
            return UNUSUAL, value
    return TRUNCATED, value


@device
def integer(data: Pointer, at: int, end: int, kind: int) -> tuple[int, int]:
    """The position after an integer of any kind, and the integer.
    A value of another kind gives UNUSUAL."""
    if kind == I8:
        return (at + 1, np.int64(np.int8(data[at]))) if at < end else (TRUNCATED, np.int64(0))
    if not I16 <= kind <= I64:
        return UNUSUAL, np.int64(0)
    at, value = varint(data, at, end)
    return at, np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))


@device
def next_field(data: Pointer, at: int, end: int, field: int) -> tuple[int, int, int]:
    """The position after a field's header, its id (after that of the field before it), and its
    kind; 0 at the struct's end."""
    if at >= end:
        return TRUNCATED, field, 0
    header = int(data[at])
    at += 1
    if header >> 4:
        if header & 15 == 0:
            return UNUSUAL, field, 0
        return at, field + (header >> 4), header & 15
    if header:
        at, number = integer(data, at, end, I16)
        return at, np.int64(number), header & 15
    return at, field, 0


@device
def list_header(data: Pointer, at: int, end: int) -> tuple[int, int, int]:
    """The position after a list's header, how many elements it has (at most as many as there are
    bytes left), and their kind."""
    if at >= end:
        return TRUNCATED, 0, 0
    header = int(data[at])
    at += 1
    count = np.int64(header >> 4)
    if count == 15:
        at, long = varint(data, at, end)
        if at < 0:
            return at, 0, 0
        if long > np.uint64(end):
            return TRUNCATED, 0, 0
        count = np.int64(long)
    if count > end - at:
        return TRUNCATED, 0, 0
    return at, count, header & 15


@device
def skip(data: Pointer, at: int, end: int, kind: int) -> int:
    """The position after a field's value."""
    if kind not in (LIST, SET, STRUCT):
        return _skip_plain(data, at, end, kind)
    count = np.int64(1)
    if kind != STRUCT:
        at, count, kind = list_header(data, at, end)
        if kind in (TRUE, FALSE):  # as an element, a boolean takes a byte
            kind = I8
        if at >= 0 and kind not in (LIST, SET, STRUCT):
            for _ in range(count):
                at = _skip_plain(data, at, end, kind)
                if at < 0:
                    break
            return at
    return _skip_nested(data, at, end, kind, count)


@device
def _skip_plain(data: Pointer, at: int, end: int, kind: int) -> int:
    """The position after a field's value that holds no others."""
    if kind in (TRUE, FALSE):
        return at
    if I16 <= kind <= I64:
        return varint(data, at, end)[0]
    size = np.uint64(1)
    if kind == BINARY:
        at, size = varint(data, at, end)
    elif kind == DOUBLE:
        size = np.uint64(8)
    elif kind != I8:
        return UNUSUAL
    if at >= 0 and size > np.uint64(end - at):
        return TRUNCATED
    return at + np.int64(size) if at >= 0 else at


@device
def _skip_nested(data: Pointer, at: int, end: int, kind: int, count: int) -> int:
    """The position after `count` values of a kind. Not recursive: what numba loads of that from its
    cache crashes (0.68)."""
    left = np.zeros(MAX_DEPTH, np.int64)
    kinds = np.zeros(MAX_DEPTH, np.int64)
    depth = 0
    left[0] = count
    kinds[0] = kind
    while at >= 0:
        if left[depth] == 0:  # a list ends
            if depth == 0:
                break
            depth -= 1
            continue
        value = kinds[depth]
        if left[depth] == FIELDS:
            at, _, value = next_field(data, at, end, 0)
            if at < 0:
                break
            if value == 0:
                depth -= 1
                continue
        else:
            left[depth] -= 1
            if value in (TRUE, FALSE):  # as an element, a boolean takes a byte
                value = I8
        if value in (LIST, SET, STRUCT):
            depth += 1
            if depth == MAX_DEPTH:
                return UNUSUAL
            left[depth] = FIELDS
            if value != STRUCT:
                at, left[depth], kinds[depth] = list_header(data, at, end)
        else:
            at = _skip_plain(data, at, end, value)
    return at


@kernel
def skip_structs(data: npt.NDArray[np.uint8], at: int, count: int) -> int:
    """The position after `count` structs of a list, the first of which is at data[at]."""
    return _skip_nested(pointer_at(data.ctypes.data, len(data)), at, len(data), STRUCT, count)
