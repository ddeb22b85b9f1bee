"""Decode integers that are stored as differences between neighbours, bit-packed in blocks
(DELTA_BINARY_PACKED).

Sums wrap around, as the format requires: they are computed in uint64, and the low bits are kept.

Source: parquet-format, Encodings.md ("Delta Encoding").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.intrinsics import Pointer, load64, pointer_at
from megablend.jit import device
from megablend.kernels.parquet.hybrid import bits_at
from megablend.kernels.parquet.thrift import varint

Tokens = npt.NDArray[Any]
BROKEN = -1
"""The values are truncated, or their header is invalid."""


@device
def decode_delta(address: int, size: int, out: Tokens) -> int:
    """Decode DELTA_BINARY_PACKED.

    Args:
        address, size: address of the encoded values, and their size in bytes.
        out: int32 or int64 [num_tokens], filled; not empty.

    Returns: 0, or BROKEN if the values are damaged or fewer than num_tokens.
    """
    data = pointer_at(address, size)
    end = size
    position, block_values = varint(data, 0, end)
    position, miniblocks = (
        varint(data, position, end) if position >= 0 else (position, block_values)
    )
    position, stated_values = (
        varint(data, position, end) if position >= 0 else (position, block_values)
    )
    position, value = _zigzag(data, position, end)
    if (
        position < 0
        or block_values == 0
        or block_values > np.uint64(1 << 31)
        or miniblocks == 0
        or miniblocks > np.uint64(1 << 16)
    ):
        return BROKEN
    # A miniblock has a multiple of 32 values
    miniblock_values = np.int64(block_values // miniblocks)
    if block_values % miniblocks or miniblock_values % 32 or stated_values < np.uint64(len(out)):
        return BROKEN
    out[0] = out.dtype.type(value)
    filled = 1
    while filled < len(out):
        position, min_delta = _zigzag(data, position, end)
        # A byte for each miniblock: the width of its differences in bits
        widths = position
        if position < 0 or np.int64(miniblocks) > end - position:
            return BROKEN
        position += np.int64(miniblocks)
        for i in range(np.int64(miniblocks)):
            if filled == len(out):
                break
            width = int(data[widths + i])
            count = min(miniblock_values, len(out) - filled)
            if width > 64 or (width and count > (end - position) * 8 // width):
                return BROKEN
            # If whole words are within the data
            if width <= 56 and position + miniblock_values * width // 8 + 8 <= end:
                mask = np.uint64((1 << width) - 1)
                for j in range(count):
                    bit = position * 8 + j * width
                    value += min_delta + (load64(data, bit >> 3) >> np.uint64(bit & 7) & mask)
                    out[filled + j] = out.dtype.type(value)
            else:
                for j in range(count):
                    value += min_delta + _wide_bits_at(data, end, position * 8 + j * width, width)
                    out[filled + j] = out.dtype.type(value)
            filled += count
            position += miniblock_values * width // 8
    return 0


@device
def _zigzag(data: Pointer, position: int, end: int) -> tuple[int, np.uint64]:
    """Read a signed integer. Returns the position after it, and the integer modulo 2**64; an error
    code in `position` is returned unchanged."""
    if position < 0:
        return position, np.uint64(0)
    position, value = varint(data, position, end)
    return position, value >> np.uint64(1) ^ (np.uint64(0) - (value & np.uint64(1)))


@device
def _wide_bits_at(data: Pointer, end: int, bit: int, width: int) -> np.uint64:
    """Return the `width` bits (0 to 64) that begin at bit number `bit`. All of them must be before
    data[end]."""
    low = min(width, 32)
    word: np.uint64 = np.uint64(bits_at(data, end, bit, low))
    if width > 32:
        word = word | np.uint64(bits_at(data, end, bit + 32, width - 32)) << np.uint64(32)
    return word
