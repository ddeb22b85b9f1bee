"""Booleans as Parquet packs them: bits, or runs of them, to bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.intrinsics import pointer_at
from megablend.jit import device
from megablend.kernels.parquet.hybrid import bits_at, next_run


@device
def decode_bits(address: int, size: int, in_runs: bool, out: npt.NDArray[np.bool_]) -> int:
    """Fill `out` from `size` bytes at `address`: the hybrid of runs and groups of one bit a value,
    or plain bits, lowest first.

    Returns: 0; -1 if the bytes end before `out` is full.

    Source: parquet-format, Encodings.md (PLAIN, RLE).
    """
    data = pointer_at(address, size)
    at = filled = 0
    while filled < len(out):
        count = size * 8
        packed = True
        first = 0
        after = size
        if in_runs:
            count, packed, first, after = next_run(data, at, size, 1)
        if count < 0 or (count == 0 and after >= size):
            return -1
        count = min(count, len(out) - filled)
        for i in range(count):
            out[filled + i] = (bits_at(data, size, first + i, 1) if packed else first) != 0
        filled += count
        if not in_runs and filled < len(out):
            return -1
        at = after
    return 0
