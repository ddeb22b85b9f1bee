"""Arrow arrays as numpy arrays. `pyarrow.Array.to_numpy` imports pandas where it is installed,
which takes 0.2 s and memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Arrow's names that are not numpy's; `pyarrow.DataType.to_pandas_dtype` may need pandas (pyarrow
25)."""


def as_numpy(array: Any) -> npt.NDArray[Any]:
    """The values of a pyarrow.Array of integers, floats or booleans without nulls; a view, except
    for booleans."""
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
