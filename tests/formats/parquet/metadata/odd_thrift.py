"""Thrift's compact protocol, read without a schema and written in ways that are odd but valid."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megablend.formats.parquet.metadata.thrift import Kind, write_varint

FLAGS = (Kind.TRUE, Kind.FALSE)
INTEGERS = (Kind.I16, Kind.I32, Kind.I64)
UNKNOWN: tuple[tuple[Kind, Any], ...] = (
    (Kind.TRUE, None),
    (Kind.I8, 7),
    (Kind.I64, 1 << 62),
    (Kind.DOUBLE, b"12345678"),
    (Kind.BINARY, b""),
    (Kind.LIST, (Kind.BINARY, [b"x"] * 20)),
)
"""Values of fields that no reader knows."""


class Value(NamedTuple):
    """A field of a struct."""

    number: int
    kind: Kind
    value: Any


@dataclass
class Odd:
    """How structs are written."""

    rng: random.Random = field(default_factory=lambda: random.Random(5))
    has_long_ids: bool = False
    """Whether ids of fields are written in full, not as differences."""
    has_long_lists: bool = False
    """Whether the lengths of short lists are written as those of long ones."""
    has_unknown_fields: bool = False
    is_shuffled: bool = False

    def struct(self, fields: list[Value]) -> bytes:
        """Write a struct."""
        fields = list(fields)
        if self.has_unknown_fields:
            fields.append(Value(self.rng.choice([17, 40, 3000]), *self.rng.choice(UNKNOWN)))
        if self.is_shuffled:
            self.rng.shuffle(fields)
        parts = list[bytes]()
        last = 0
        for number, kind, value in fields:
            if self.has_long_ids or not 1 <= number - last <= 15:
                parts.append(bytes([kind]) + zigzag(number))
            else:
                parts.append(bytes([number - last << 4 | kind]))
            last = number
            if kind not in FLAGS:
                parts.append(self.value(kind, value))
        return b"".join(parts) + b"\0"

    def value(self, kind: int, value: Any) -> bytes:
        """Write a value that is no flag of a struct."""
        if kind == Kind.STRUCT:
            return self.struct(value)
        if kind == Kind.LIST:
            element, items = value
            if len(items) < 15 and not self.has_long_lists:
                head = bytes([len(items) << 4 | element])
            else:
                head = bytes([0xF0 | element]) + write_varint(len(items))
            return head + b"".join(self.value(element, item) for item in items)
        if kind == Kind.BINARY:
            return write_varint(len(value)) + bytes(value)
        if kind in INTEGERS:
            return zigzag(value)
        return bytes(value) if kind == Kind.DOUBLE else bytes([value])


def zigzag(number: int) -> bytes:
    return write_varint((number << 1 ^ number >> 63) & (1 << 64) - 1)


class Reader:
    """A reader of structs from `data`, which begins with one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def struct(self) -> list[Value]:
        """Read a struct: its fields in their order."""
        fields = list[Value]()
        number = 0
        while header := self._take(1)[0]:
            number = number + (header >> 4) if header >> 4 else self._integer()
            kind = Kind(header & 15)
            fields.append(Value(number, kind, None if kind in FLAGS else self._value(kind)))
        return fields

    def _value(self, kind: int) -> Any:
        if kind == Kind.STRUCT:
            return self.struct()
        if kind == Kind.LIST:
            header = self._take(1)[0]
            count = self._varint() if header >> 4 == 15 else header >> 4
            element = header & 15  # 0 in some empty lists
            # A flag in a list takes a byte, as an integer of one byte does
            one = Kind.I8 if element in FLAGS else element
            return element, [self._value(one) for _ in range(count)]
        if kind == Kind.BINARY:
            return self._take(self._varint())
        if kind in INTEGERS:
            return self._integer()
        return self._take(8) if kind == Kind.DOUBLE else self._take(1)[0]

    def _take(self, count: int) -> bytes:
        taken = self._data[self._position : self._position + count]
        self._position += count
        return taken

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
