"""Thrift's compact protocol, as far as Parquet's metadata needs it.

A struct is read into a `Struct`: field id -> value, without a schema. The caller requests each
field by its id, name and type, so that a wrong or missing field causes an error that names this
field. Nothing is trusted: every length is compared with the bytes that are left in the buffer
before it is used.

Source: Thrift "compact protocol" specification (thrift/doc/specs/thrift-compact-protocol.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TypeVar, overload

import numpy as np

from megablend.kernels.parquet.footer import MAX_COUNT
from megablend.kernels.parquet.thrift import skip_structs

T = TypeVar("T")

MAX_DEPTH = 32
"""Maximum depth of nested structs; Parquet's metadata has a depth of 7."""


class MalformedError(ValueError):
    """Raised for bytes that violate the format. Callers that know the file convert it to a
    CorruptFileError."""

    def __init__(self, problem: str, item: int = 0) -> None:
        super().__init__(problem)
        self.item = item
        """Index of the malformed item, if many items are parsed together."""


class TruncatedError(MalformedError):
    """Raised if the bytes end too early; reading more of the file may help."""


class UnsupportedError(ValueError):
    """Raised for bytes that are valid but not supported. Callers that know the file convert it to
    an UnsupportedFileError."""

    def __init__(self, problem: str, item: int = 0) -> None:
        super().__init__(problem)
        self.item = item
        """See MalformedError."""


class Kind(IntEnum):
    """Wire types of the compact protocol."""

    TRUE = 1
    FALSE = 2
    I8 = 3
    I16 = 4
    I32 = 5
    I64 = 6
    DOUBLE = 7
    BINARY = 8
    LIST = 9
    SET = 10
    MAP = 11
    STRUCT = 12
    UUID = 13


class Struct:
    """A struct that was read. Its methods return a field by its id. Methods that take a `name`
    raise a MalformedError with this name if the field is missing or has another type."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[int, object]) -> None:
        self._fields = fields

    def __contains__(self, field: int) -> bool:
        return field in self._fields

    def integer(self, field: int, name: str, default: int | None = None) -> int:
        """Return a field of any integer type. With a default, a field of another type counts as
        absent, as in Thrift's own readers."""
        value = self._fields.get(field)
        if type(value) is int:
            return value
        # For example, fastparquet writes a repetition_type that is a boolean
        if default is not None:
            return int(default)
        raise MalformedError(f"{name} is {'missing' if value is None else 'not an integer'}")

    def count(self, field: int, name: str, default: int | None = None) -> int:
        """Return an integer that must not be negative."""
        value = self.integer(field, name, default)
        if not 0 <= value <= MAX_COUNT:
            raise MalformedError(f"{name} is {value}, expected 0 to 2**48")
        return value

    def boolean(self, field: int, name: str, default: bool) -> bool:
        """Return a boolean field."""
        return self._typed(field, name, bool, default)

    def text(self, field: int, name: str) -> str:
        """Return a binary field, read as UTF-8."""
        return self._typed(field, name, bytes).decode("utf-8", "replace")

    def struct(self, field: int, name: str) -> Struct:
        """Return a nested struct."""
        return self._typed(field, name, Struct)

    def structs(self, field: int, name: str) -> Sequence[Struct]:
        """Return a list of structs."""
        value = self._fields.get(field)
        return value if isinstance(value, Structs) else self._list(field, name, Struct)

    def _typed(self, field: int, name: str, value_type: type[T], default: T | None = None) -> T:
        value = self._fields.get(field, default)
        if not isinstance(value, value_type):
            raise MalformedError(f"{name} is {'missing' if value is None else 'of the wrong type'}")
        return value

    def _list(self, field: int, name: str, value_type: type[T]) -> list[T]:
        values = self._typed(field, name, list)
        if not all(type(value) is value_type for value in values):
            raise MalformedError(f"{name} contains elements of the wrong type")
        return values


def read_struct(data: bytes | memoryview, start: int = 0) -> tuple[Struct, int]:
    """Read the struct at `start`. Returns the struct, and the position after it.
    Raises: MalformedError, TruncatedError."""
    reader = _Reader(data, start)
    try:
        return reader.struct(0), reader.position
    except IndexError:
        raise TruncatedError(
            f"a struct does not end within its {len(data) - start} bytes"
        ) from None


class Structs(Sequence[Struct]):
    """A list of structs, each of which is parsed only when it is accessed. A footer may list
    thousands of columns, and only one of them is needed."""

    __slots__ = ("_data", "_size", "start")

    def __init__(self, data: bytes | memoryview, start: int, size: int) -> None:
        self._data = data
        self.start = start
        self._size = size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Struct: ...
    @overload
    def __getitem__(self, index: slice) -> list[Struct]: ...
    def __getitem__(self, index: int | slice) -> Struct | list[Struct]:
        if isinstance(index, slice):
            return list(self)[index]
        return read_struct(self._data, self.find(range(self._size)[index]))[0]

    def __iter__(self) -> Iterator[Struct]:
        position = self.start
        for _ in range(self._size):
            struct, position = read_struct(self._data, position)
            yield struct

    def written(self) -> bytes:
        """Return the encoded bytes of the structs."""
        return bytes(self._data[self.start : self.find(self._size)])

    def find(self, index: int) -> int:
        """Return the position after `index` structs; negative if they are damaged or unusual."""
        return skip_structs(np.frombuffer(self._data, np.uint8), self.start, index)


class _Reader:
    """A reader with a position in a buffer. Reading past the buffer's end raises IndexError."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes | memoryview, position: int) -> None:
        self.data = data
        self.position = position

    def byte(self) -> int:
        value = self.data[self.position]
        self.position += 1
        return value

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise MalformedError("an integer is longer than 10 bytes")
        return value & 0xFFFF_FFFF_FFFF_FFFF

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.position:
            raise TruncatedError(
                f"{size} bytes are declared, but only {len(self.data) - self.position} are left"
            )
        start = self.position
        self.position = self.position + size
        return bytes(self.data[start : self.position])

    def struct(self, depth: int) -> Struct:
        if depth > MAX_DEPTH:
            raise MalformedError(f"structs are nested deeper than {MAX_DEPTH}")
        fields: dict[int, object] = {}
        field = 0
        while header := self.byte():
            delta = header >> 4
            kind = header & 0x0F
            field = field + delta if delta else self.zigzag()
            if kind in (Kind.TRUE, Kind.FALSE):
                fields[field] = kind == Kind.TRUE
            else:
                fields[field] = self.value(kind, depth)
        return Struct(fields)

    def value(self, kind: int, depth: int) -> object:
        if kind in (Kind.I16, Kind.I32, Kind.I64):
            return self.zigzag()
        if kind == Kind.BINARY:
            return self.take(self.varint())
        if kind == Kind.STRUCT:
            return self.struct(depth + 1)
        if kind in (Kind.LIST, Kind.SET):
            return self.list(depth + 1)
        # A boolean in a list takes one byte
        if kind in (Kind.TRUE, Kind.FALSE):
            return self.byte() == Kind.TRUE
        if kind == Kind.I8:
            return (self.byte() ^ 0x80) - 0x80
        if kind == Kind.DOUBLE:
            return struct.unpack("<d", self.take(8))[0]
        if kind == Kind.UUID:
            return self.take(16)
        if kind == Kind.MAP:
            return self.map(depth + 1)
        raise MalformedError(f"unknown wire type {kind}")

    def list(self, depth: int) -> Sequence[object]:
        if depth > MAX_DEPTH:
            raise MalformedError(f"lists are nested deeper than {MAX_DEPTH}")
        header = self.byte()
        size = header >> 4
        kind = header & 0x0F
        size = self.varint() if size == 15 else size
        self.check_room(size)
        if kind == Kind.STRUCT:
            structs = Structs(self.data, self.position, size)
            end = structs.find(size)
            if end >= 0:
                self.position = end
                return structs
        return [self.value(kind, depth) for _ in range(size)]

    def map(self, depth: int) -> dict[object, object] | None:
        if depth > MAX_DEPTH:
            raise MalformedError(f"maps are nested deeper than {MAX_DEPTH}")
        size = self.varint()
        self.check_room(size)
        # Parquet's metadata has no maps: the entries are skipped
        if size:
            kinds = self.byte()
            for _ in range(size):
                self.value(kinds >> 4, depth)
                self.value(kinds & 0x0F, depth)
        return None

    def check_room(self, size: int) -> None:
        """Check that the buffer has at least `size` more bytes. `size` is the declared number of
        elements, each of which takes at least one byte. Raises: TruncatedError."""
        if size > len(self.data) - self.position:
            raise TruncatedError(
                f"{size} elements are declared, but only {len(self.data) - self.position} bytes are left"
            )


def write_varint(value: int) -> bytes:
    """Encode a non-negative integer, such as a length, as a varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
