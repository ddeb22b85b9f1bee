"""The few parts of the flatbuffer encoding that Arrow's footer and record batch messages use, with
every offset checked.

Source: FlatBuffers internals ("Tables", "Vectors"); Arrow's File.fbs, Message.fbs.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt


class FlatbufferError(ValueError):
    """An offset or a length points outside the buffer; the caller adds the file's name."""


class Table:
    """A table: fields by number; absent fields have their default."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._vtable = position - self._scalar_at("<i", position)
        self._vtable_bytes: int = self._scalar_at("<H", self._vtable)

    @classmethod
    def root(cls, data: bytes, start: int = 0) -> Table:
        """The outermost table of the flatbuffer that begins at byte `start`."""
        return cls(data, start + _unpack("<I", data, start))

    def scalar(self, field: int, kind: str, default: int) -> int:
        """An integer of struct's `kind`."""
        place = self._place(field)
        return default if place is None else self._scalar_at(kind, place)

    def table(self, field: int) -> Table | None:
        """A table, or None if it is absent."""
        place = self._place(field)
        return None if place is None else Table(self._data, place + self._scalar_at("<I", place))

    def vector(self, field: int, dtype: npt.DTypeLike) -> npt.NDArray[np.void]:
        """A vector of structs or scalars; an absent one is empty."""
        place = self._place(field)
        if place is None:
            return np.empty(0, dtype)
        start = place + self._scalar_at("<I", place)
        count = self._scalar_at("<I", start)
        if start + 4 + count * np.dtype(dtype).itemsize > len(self._data):
            raise FlatbufferError(
                f"a vector of {count} entries at byte {start} ends after the buffer"
            )
        return np.frombuffer(self._data, dtype, count, start + 4)

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._vtable_bytes:
            return None
        offset = self._scalar_at("<H", self._vtable + entry)
        return self._position + offset if offset else None

    def _scalar_at(self, kind: str, position: int) -> int:
        return _unpack(kind, self._data, position)


def _unpack(kind: str, data: bytes, position: int) -> int:
    if not 0 <= position <= len(data) - struct.calcsize(kind):
        raise FlatbufferError(f"an offset points to byte {position} of {len(data)}")
    value: int = struct.unpack_from(kind, data, position)[0]
    return value
