"""Memory for what is filled at once and soon let go."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def empty_from_arrow_pool(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array that holds anything. Arrow's pool keeps freed memory at hand: fresh pages from the system cost more to touch."""
    kind = np.dtype(dtype)
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    return np.frombuffer(pa.allocate_buffer(size * kind.itemsize), np.uint8).view(kind).reshape(shape)
