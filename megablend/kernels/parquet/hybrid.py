"""Parquet's hybrid of runs and bit-packed groups, one run at a time.

Source: parquet-format, Encodings.md ("Run Length Encoding / Bit-Packing Hybrid").
"""

from __future__ import annotations

import numpy as np

from megablend.intrinsics import Pointer, load64
from megablend.jit import device

BROKEN = -1


@device
def next_run(data: Pointer, at: int, end: int, width: int) -> tuple[int, bool, int, int]:
    """The run whose header is at `at`.

    Args:
        data: the stream ends before data[end].
        width: bits a value, 0 to 32.

    Returns: how many values (0 in an empty run; BROKEN if the stream is truncated inside a header
    or a run's value); whether they are bit-packed; the number of their first bit, or the value that
    they all have; the position of the next run.
    """
    header = 0
    shift = 0
    while True:
        if at >= end or shift > 28:
            return BROKEN, False, 0, end
        byte = int(data[at])
        at += 1
        header |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    count = header >> 1
    if header & 1:
        count *= 8
        if count * width > (end - at) * 8:  # the last group may be cut short by its writer
            return (end - at) * 8 // width, True, at * 8, end
        return count, True, at * 8, at + count * width // 8
    size = (width + 7) // 8
    if at + size > end:
        return BROKEN, False, 0, end
    value = 0
    for i in range(size):
        value |= int(data[at + i]) << 8 * i
    return count, False, value, at + size


@device
def bits_at(data: Pointer, end: int, bit: int, width: int) -> int:
    """The `width` bits (0 to 32) that begin at bit number `bit`; all are before data[end]."""
    at = bit >> 3
    if at + 8 <= end:
        return int((load64(data, at) >> np.uint64(bit & 7)) & np.uint64((1 << width) - 1))
    word = 0
    for i in range((width + (bit & 7) + 7) // 8):
        word |= int(data[at + i]) << 8 * i
    return (word >> (bit & 7)) & ((1 << width) - 1)
