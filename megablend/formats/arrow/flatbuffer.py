"""A reader of flatbuffers that supports what Arrow's footers and messages need, and checks every
offset.

Source: FlatBuffers internals ("Tables", "Vectors"); Arrow's File.fbs, Message.fbs.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt


class FlatbufferError(ValueError):
    """Raised if an offset or a length points outside the buffer; the caller adds the file name."""


class Table:
    """A table. Its fields are read by their number; a field that is absent has its default
    value."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._vtable = position - self._scalar_at("<i", position)
        self._vtable_bytes: int = self._scalar_at("<H", self._vtable)

    @classmethod
    def root(cls, data: bytes, start: int = 0) -> Table:
        """Return the outermost table of the flatbuffer that begins at byte `start`."""
        return cls(data, start + _unpack("<I", data, start))

    def scalar(self, field: int, kind: str, default: int) -> int:
        """Read an integer field; `kind` is its format in the `struct` module."""
        position = self._field_position(field)
        return default if position is None else self._scalar_at(kind, position)

    def table(self, field: int) -> Table | None:
        """Read a field that is a table; return None if it is absent."""
        position = self._field_position(field)
        if position is None:
            return None
        return Table(self._data, position + self._scalar_at("<I", position))

    def vector(self, field: int, dtype: npt.DTypeLike) -> npt.NDArray[np.void]:
        """Read a field that is a vector of structs or scalars; empty if it is absent."""
        position = self._field_position(field)
        if position is None:
            return np.empty(0, dtype)
        start = position + self._scalar_at("<I", position)
        count = self._scalar_at("<I", start)
        if start + 4 + count * np.dtype(dtype).itemsize > len(self._data):
            raise FlatbufferError(
                f"a vector of {count} entries at byte {start} ends after the buffer"
            )
        return np.frombuffer(self._data, dtype, count, start + 4)

    def _field_position(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._vtable_bytes:
            return None
        offset = self._scalar_at("<H", self._vtable + entry)
        return self._position + offset if offset else None

    def _scalar_at(self, kind: str, position: int) -> int:
        return _unpack(kind, self._data, position)


def _unpack(kind: str, data: bytes, position: int) -> int:
    if not 0 <= position <= len(data) - struct.calcsize(kind):
        raise FlatbufferError(f"an offset points to byte {position}, outside the {len(data)} bytes")
    value: int = struct.unpack_from(kind, data, position)[0]
    return value
