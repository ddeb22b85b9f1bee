"""Memory for arrays that are filled at once and soon released."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def empty_from_arrow_pool(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array. Arrow's pool reuses freed memory: new pages from the system are
    slower on first access."""
    kind = np.dtype(dtype)
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    return (
        np.frombuffer(pa.allocate_buffer(size * kind.itemsize), np.uint8).view(kind).reshape(shape)
    )
