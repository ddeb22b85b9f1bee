"""Types of arrays, by their dtype; shapes are where they are used."""

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
