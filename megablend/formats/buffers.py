"""Memory for bytes that are read and decoded, and conversion of Arrow arrays to numpy arrays."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

LARGE_BYTES = 8 << 20
"""Buffers of this size or more are mapped, so that their memory is returned to the system as soon
as they are freed. Arrow's pool and malloc keep freed memory: with one such buffer per thread, a
process would exceed `memory`. Smaller buffers come from the pool, since reusing memory costs
less."""
_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""The numpy names of types that Arrow names differently. (`pyarrow.DataType.to_pandas_dtype` may
need pandas, as in pyarrow 25.)"""


def allocate_buffer(size: int) -> pa.Buffer:
    """Return an uninitialised buffer of `size` bytes."""
    if size < LARGE_BYTES:
        return pa.allocate_buffer(size)
    return pa.py_buffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def memory_at(address: int, size: int) -> memoryview:
    """Return a view of bytes in memory, uint8 [size]. The caller must keep the memory alive."""
    return memoryview(pa.foreign_buffer(int(address), int(size))).cast("B")


def empty_from_arrow_pool(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised array in memory of Arrow's pool, which reuses freed memory: new pages
    from the system are slower on first access."""
    item_dtype = np.dtype(dtype)
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    data = np.frombuffer(pa.allocate_buffer(size * item_dtype.itemsize), np.uint8)
    return data.view(item_dtype).reshape(shape)


def as_numpy(array: Any) -> npt.NDArray[Any]:
    """Return the values of a pyarrow.Array of integers, floats or booleans without nulls. The
    result is a view, except for booleans."""
    assert not array.null_count
    data = array.buffers()[1]
    length = len(array)
    if array.type.bit_width == 1:
        bits = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        values = np.unpackbits(bits, bitorder="little")[array.offset : array.offset + length]
        return values.astype(np.bool_)
    name = str(array.type)
    dtype = np.dtype(_NUMPY_NAMES.get(name, name))
    if data is None:
        return np.zeros(0, dtype)
    return np.frombuffer(data, dtype, length, array.offset * dtype.itemsize)
