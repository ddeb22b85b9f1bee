"""Read Parquet's hybrid encoding (runs of one repeated value, and bit-packed groups), one run at a
time.

Source: parquet-format, Encodings.md ("Run Length Encoding / Bit-Packing Hybrid").
"""

from __future__ import annotations

import numpy as np

from megablend.intrinsics import Pointer, load64
from megablend.jit import device

BROKEN = -1
"""Returned as the number of values if the stream ends within the run's header or value."""


@device
def next_run(data: Pointer, position: int, end: int, width: int) -> tuple[int, bool, int, int]:
    """Read the header of the run at data[position], and its repeated value if it is not bit-packed.

    Args:
        data: the stream, which ends before data[end].
        width: bits of a value, 0 to 32.

    Returns: four values:
        count: number of values, which may be 0, or BROKEN.
        is_packed: whether the values are bit-packed; if not, all are the same.
        first: if the values are bit-packed, the position of the first bit in `data`, in bits; if
            not, the repeated value.
        next_position: position of the next run.
    """
    header = 0
    shift = 0
    while True:
        if position >= end or shift > 28:
            return BROKEN, False, 0, end
        byte = int(data[position])
        position += 1
        header |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    count = header >> 1
    if header & 1:
        count *= 8
        # Some writers cut the last group short
        if count * width > (end - position) * 8:
            return (end - position) * 8 // width, True, position * 8, end
        return count, True, position * 8, position + count * width // 8
    size = (width + 7) // 8
    if position + size > end:
        return BROKEN, False, 0, end
    value = 0
    for i in range(size):
        value |= int(data[position + i]) << 8 * i
    return count, False, value, position + size


@device
def bits_at(data: Pointer, end: int, bit: int, width: int) -> int:
    """Return the `width` bits (0 to 32) that begin at bit number `bit`. All of them must be before
    data[end]."""
    position = bit >> 3
    if position + 8 <= end:
        return int((load64(data, position) >> np.uint64(bit & 7)) & np.uint64((1 << width) - 1))
    word = 0
    for i in range((width + (bit & 7) + 7) // 8):
        word |= int(data[position + i]) << 8 * i
    return (word >> (bit & 7)) & ((1 << width) - 1)
