"""Memory for what is read and decoded, and Arrow arrays as numpy arrays."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

LARGE_BYTES = 8 << 20
"""Buffers of this size or more are mapped, and the system has them back as soon as they are freed.
Arrow's pool and malloc keep what threads have freed: one such buffer of each thread would exceed
`memory`. Smaller ones are reused, which costs less."""


def allocate_buffer(size: int) -> pa.Buffer:
    """An uninitialised buffer of `size` bytes."""
    if size < LARGE_BYTES:
        return pa.allocate_buffer(size)
    return pa.py_buffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def memory_at(address: int, size: int) -> memoryview:
    """The bytes at an address in memory, uint8 [size], which somebody else keeps alive."""
    return memoryview(pa.foreign_buffer(int(address), int(size))).cast("B")


def empty_from_arrow_pool(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array. Arrow's pool reuses freed memory: new pages from the system are
    slower on first access."""
    kind = np.dtype(dtype)
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    return (
        np.frombuffer(pa.allocate_buffer(size * kind.itemsize), np.uint8).view(kind).reshape(shape)
    )


_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Arrow's names that are not numpy's; `pyarrow.DataType.to_pandas_dtype` may need pandas (pyarrow
25)."""


def as_numpy(array: Any) -> npt.NDArray[Any]:
    """The values of a pyarrow.Array of integers, floats or booleans without nulls;
    a view, except for booleans."""
    assert not array.null_count
    data = array.buffers()[1]
    length = len(array)
    if array.type.bit_width == 1:
        bits = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        found = np.unpackbits(bits, bitorder="little")[array.offset : array.offset + length]
        return found.astype(np.bool_)
    name = str(array.type)
    dtype = np.dtype(_NUMPY_NAMES.get(name, name))
    if data is None:
        return np.zeros(0, dtype)
    return np.frombuffer(data, dtype, length, array.offset * dtype.itemsize)
