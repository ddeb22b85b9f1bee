"""Differences between neighbouring integers, bit-packed in blocks.

Sums wrap around, as the format asks: they are made in uint64, and the low bits are kept.

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
        address, size: the address of the encoded values, and their size in bytes.
        out: int32 or int64 [num_tokens], filled; num_tokens above 0.

    Returns: 0 or BROKEN (there are fewer values than num_tokens, too).
    """
    data = pointer_at(address, size)
    end = size
    at, block = varint(data, 0, end)
    at, miniblocks = varint(data, at, end) if at >= 0 else (at, block)
    at, announced = varint(data, at, end) if at >= 0 else (at, block)
    at, value = _zigzag(data, at, end)
    # Blocks are of a multiple of 128 values, miniblocks of a multiple of 32.
    if (
        at < 0
        or block == 0
        or block > np.uint64(1 << 31)
        or miniblocks == 0
        or miniblocks > np.uint64(1 << 16)
    ):
        return BROKEN
    each = np.int64(block // miniblocks)
    if block % miniblocks or each % 32 or announced < np.uint64(len(out)):
        return BROKEN
    out[0] = out.dtype.type(value)
    filled = 1
    while filled < len(out):
        at, least = _zigzag(data, at, end)
        widths = at
        if at < 0 or np.int64(miniblocks) > end - at:
            return BROKEN
        at += np.int64(miniblocks)
        for i in range(np.int64(miniblocks)):
            if filled == len(out):
                break
            width = int(data[widths + i])
            count = min(each, len(out) - filled)
            if width > 64 or (width and count > (end - at) * 8 // width):
                return BROKEN
            if width <= 56 and at + each * width // 8 + 8 <= end:  # whole words are within the data
                mask = np.uint64((1 << width) - 1)
                for j in range(count):
                    bit = at * 8 + j * width
                    value += least + (load64(data, bit >> 3) >> np.uint64(bit & 7) & mask)
                    out[filled + j] = out.dtype.type(value)
            else:
                for j in range(count):
                    value += least + _wide_bits_at(data, end, at * 8 + j * width, width)
                    out[filled + j] = out.dtype.type(value)
            filled += count
            at += each * width // 8
    return 0


@device
def _zigzag(data: Pointer, at: int, end: int) -> tuple[int, np.uint64]:
    """The position after a signed integer (below 0 if `at` is, too), and the integer, modulo
    2**64."""
    if at < 0:
        return at, np.uint64(0)
    at, value = varint(data, at, end)
    return at, value >> np.uint64(1) ^ (np.uint64(0) - (value & np.uint64(1)))


@device
def _wide_bits_at(data: Pointer, end: int, bit: int, width: int) -> np.uint64:
    """The `width` bits (0 to 64) that begin at bit number `bit`; all are before data[end]."""
    low = min(width, 32)
    word: np.uint64 = np.uint64(bits_at(data, end, bit, low))
    if width > 32:
        word = word | np.uint64(bits_at(data, end, bit + 32, width - 32)) << np.uint64(32)
    return word
