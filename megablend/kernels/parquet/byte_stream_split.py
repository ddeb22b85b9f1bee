"""Integers whose first bytes are stored together, then their second ones, and so on.

Source: parquet-format, Encodings.md ("Byte Stream Split").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.intrinsics import pointer_at
from megablend.jit import device

Tokens = npt.NDArray[Any]


@device
def join_streams(address: int, out: Tokens) -> None:
    """Decode BYTE_STREAM_SPLIT.

    Args:
        address: the address of the encoded values, as many bytes as `out` has: the first bytes of
            all, then the second.
        out: int32 or int64 [num_tokens], filled.
    """
    data = pointer_at(address, out.nbytes)
    count = len(out)
    size = out.nbytes
    for begin in range(0, size, 4 * count):  # four streams at once: the loop is vectorised
        shift = np.uint64(8 * begin // count)
        for i in range(count):
            word = np.uint32(data[begin + i]) | np.uint32(data[begin + count + i]) << np.uint32(8)
            word |= np.uint32(data[begin + 2 * count + i]) << np.uint32(16)
            word |= np.uint32(data[begin + 3 * count + i]) << np.uint32(24)
            if begin == 0:
                out[i] = np.int32(word)
            else:
                out[i] = np.int64(out[i]) & np.int64(0xFFFF_FFFF) | np.int64(
                    np.uint64(word) << shift
                )
