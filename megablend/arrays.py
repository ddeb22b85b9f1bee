"""Array types by dtype, and running totals. Shapes are documented where arrays are used."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]
Int16s: TypeAlias = npt.NDArray[np.int16]
Bools: TypeAlias = npt.NDArray[np.bool_]
Uint8s: TypeAlias = npt.NDArray[np.uint8]
Uint32s: TypeAlias = npt.NDArray[np.uint32]
Uint64s: TypeAlias = npt.NDArray[np.uint64]
Float64s: TypeAlias = npt.NDArray[np.float64]


def running_totals(counts: npt.ArrayLike) -> Int64s:
    """Return the sum of the counts before each of `counts` [n], followed by the sum of all: int64
    [n + 1]. If these are the lengths of consecutive ranges, the result is the start of each range
    and the end of the last."""
    numbers = np.asarray(counts)
    totals = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(numbers, dtype=np.int64, out=totals[1:])
    return totals
