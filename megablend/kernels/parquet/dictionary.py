"""Decode dictionary indices to values.

Source: parquet-format, Encodings.md ("Dictionary Encoding").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.intrinsics import load64, pointer_at
from megablend.jit import device
from megablend.kernels.parquet.hybrid import bits_at, next_run

Tokens = npt.NDArray[Any]
BROKEN = -1
"""The indices are truncated, or wider than the format allows."""
OUT_OF_RANGE = -2
"""An index is not in the dictionary."""


@device
def decode_dictionary(address: int, size: int, dictionary: Tokens, out: Tokens) -> int:
    """Look up a page's indices in its dictionary. The indices are stored as one byte with their
    width in bits, followed by a hybrid of runs and bit-packed groups.

    Args:
        address, size: address of the encoded indices, and their size in bytes.
        dictionary: int32 or int64 [num_entries].
        out: [num_tokens], of the same type, filled.

    Returns: 0, BROKEN or OUT_OF_RANGE.
    """
    data = pointer_at(address, size)
    end = size
    if end == 0 or data[0] > 32:
        return BROKEN
    width = int(data[0])
    position = 1
    filled = 0
    total = len(out)
    entries = np.uint64(len(dictionary))
    while filled < total:
        # All indices are 0
        if width == 0:
            count = total
            packed = False
            begin = 0
            position = end
        else:
            count, packed, begin, position = next_run(data, position, end, width)
        if count < 0 or (count == 0 and position >= end):
            return BROKEN
        stop = filled + min(count, total - filled)
        if not packed:
            if np.uint64(begin) >= entries:
                return OUT_OF_RANGE
            out[filled:stop] = dictionary[begin]
        else:
            # Read words of 8 bytes, as long as these are within the data; then byte by byte
            mask = np.uint64((1 << width) - 1)
            words_stop = min(stop, filled + max(0, ((end - 8) * 8 - begin) // width))
            bit = begin
            for i in range(filled, words_stop):
                index = load64(data, bit >> 3) >> np.uint64(bit & 7) & mask
                if index >= entries:
                    return OUT_OF_RANGE
                out[i] = dictionary[index]
                bit += width
            for i in range(max(filled, words_stop), stop):
                index = np.uint64(bits_at(data, end, bit, width))
                if index >= entries:
                    return OUT_OF_RANGE
                out[i] = dictionary[index]
                bit += width
        filled = stop
    return 0
