"""Checksums of a table's rows: 4 bytes for each row, computed from its number and its values, and
stored next to the table.

h = mix(number + GOLDEN); for each value h = mix(h ^ value); the checksum is the upper half of h.
`mix` is one to one, so rows that differ in one value never have the same h. The formula is part of
the format on disk: changing it requires a new version of the format.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import kernel
from megablend.kernels.blend.keyed_hash import mix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)


@kernel
def row_checks(
    rows: npt.NDArray[np.uint64], values: npt.NDArray[np.uint64], out: npt.NDArray[np.uint32]
) -> None:
    """Compute the checksums of rows.

    Args:
        rows: uint64 [n], the number of each row.
        values: uint64 [num_columns, n], the rows' values; negative ones as two's complement.
        out: uint32 [n], filled with the checksums.
    """
    for i in range(len(rows)):
        h = mix(rows[i] + _GOLDEN)
        for j in range(len(values)):
            h = mix(h ^ values[j, i])
        out[i] = np.uint32(h >> _32)
