"""Writes Thrift's compact protocol, for files that no library would write."""

from __future__ import annotations

from collections.abc import Sequence

from megablend.formats.parquet.metadata.thrift import Kind


def write_struct(fields: Sequence[tuple[int, Kind, object]]) -> bytes:
    """Encode a struct, given (field id, kind, value) of its fields, ids ascending. The value of a
    LIST is (kind of its elements, elements)."""
    parts = []
    previous = 0
    for field, kind, value in fields:
        parts += [bytes([(field - previous) << 4 | kind]), _written(kind, value)]
        previous = field
    return b"".join([*parts, b"\0"])


def _written(kind: Kind, value: object) -> bytes:
    if kind in (Kind.I32, Kind.I64) and isinstance(value, int):
        return _varint(value << 1 ^ value >> 63)
    if kind == Kind.BINARY and isinstance(value, bytes):
        return _varint(len(value)) + value
    if kind == Kind.STRUCT and isinstance(value, bytes):
        return value
    if kind == Kind.LIST and isinstance(value, tuple):
        element, values = value
        return (
            bytes([0xF0 | element])
            + _varint(len(values))
            + b"".join(_written(element, v) for v in values)
        )
    raise TypeError(f"cannot write {value!r} as {kind.name}")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
