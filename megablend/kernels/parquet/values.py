"""Decode the values of pages with any supported encoding in one call.

Source: parquet-format, Encodings.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.intrinsics import Pointer, bytes_at, pointer_at
from megablend.jit import device, kernel
from megablend.kernels.parquet.delta import decode_delta
from megablend.kernels.parquet.dictionary import OUT_OF_RANGE, decode_dictionary
from megablend.kernels.parquet.hybrid import bits_at, next_run

Tokens = npt.NDArray[Any]


VALUES_DTYPE = np.dtype(
    [
        ("decoder", "<i8"),  # PLAIN, RLE_DICTIONARY, ...
        ("address", "<i8"),  # address of the encoded values
        ("size", "<i8"),  # their size in bytes
        ("count", "<i8"),  # number of values
        ("out", "<i8"),  # address to write to
        ("dictionary", "<i8"),  # address of the dictionary's entries
        ("entries", "<i8"),  # number of entries
        ("problem", "<i8"),  # output: SOUND, SHORT or UNLISTED
    ]
)
"""The values of one page."""
(
    PLAIN,
    RLE_DICTIONARY,
    DELTA_BINARY_PACKED,
    BYTE_STREAM_SPLIT,
    PLAIN_BOOLEANS,
    RLE_BOOLEANS,
) = range(6)
"""Decoders, named after their encodings; RLE_DICTIONARY also decodes PLAIN_DICTIONARY."""
SOUND, SHORT, UNLISTED = range(3)
"""Values of `problem`: no problem; the values are damaged or fewer than `count`; an index is not in
the dictionary."""


@kernel
def decode_values(pages: npt.NDArray[np.void], like: npt.NDArray[Any]) -> None:
    """Decode the values of many pages.

    Args:
        pages: VALUES_DTYPE [n]; the field `problem` is filled. The memory at `out` must have room
            for `count` values.
        like: any array of the values' dtype: int32, int64, or uint8 for booleans.
    """
    for i in range(len(pages)):
        page = pages[i]
        address = page["address"]
        size = page["size"]
        count = page["count"]
        decoder = page["decoder"]
        out = bytes_at(page["out"], count * like.itemsize).view(like.dtype)
        # 0, OUT_OF_RANGE, or another code below 0
        result = 0
        if count == 0:
            pass
        elif decoder == PLAIN:
            result = -1 if count * like.itemsize > size else 0
            values = bytes_at(address, count * like.itemsize * (result == 0)).view(like.dtype)
            for j in range(len(values)):
                out[j] = values[j]
        elif decoder == RLE_DICTIONARY:
            entries = bytes_at(page["dictionary"], page["entries"] * like.itemsize).view(like.dtype)
            result = decode_dictionary(address, size, entries, out)
        elif decoder == DELTA_BINARY_PACKED:
            result = decode_delta(address, size, out)
        elif decoder == BYTE_STREAM_SPLIT:
            result = -1 if count * like.itemsize != size else 0
            if result == 0:
                join_streams(address, out)
        elif decoder == PLAIN_BOOLEANS:
            result = decode_bits(address, size, False, out)
        else:
            # RLE_BOOLEANS: the size of the runs precedes them
            run_bytes = _stated_bytes(pointer_at(address, size), size)
            result = -1 if run_bytes > size - 4 else decode_bits(address + 4, run_bytes, True, out)
        if result == 0:
            page["problem"] = SOUND
        else:
            page["problem"] = UNLISTED if result == OUT_OF_RANGE else SHORT


@device
def join_streams(address: int, out: Tokens) -> None:
    """Decode BYTE_STREAM_SPLIT.

    Args:
        address: address of the encoded values, as many bytes as `out` has: first the lowest bytes
            of all values, then their second bytes, and so on.
        out: int32 or int64 [num_tokens], filled.
    """
    data = pointer_at(address, out.nbytes)
    count = len(out)
    size = out.nbytes
    # Four streams at once, so that the inner loop is vectorised
    for begin in range(0, size, 4 * count):
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


@device
def decode_bits(address: int, size: int, in_runs: bool, out: npt.NDArray[np.bool_]) -> int:
    """Decode booleans from `size` bytes at `address` to `out`. If `in_runs` is true, they are
    encoded as a hybrid of runs and bit-packed groups, otherwise as plain bits, lowest first.

    Returns: 0, or -1 if the bytes end before `out` is full.

    Source: parquet-format, Encodings.md (PLAIN, RLE).
    """
    data = pointer_at(address, size)
    position = 0
    filled = 0
    while filled < len(out):
        count = size * 8
        packed = True
        first = 0
        after = size
        if in_runs:
            count, packed, first, after = next_run(data, position, size, 1)
        if count < 0 or (count == 0 and after >= size):
            return -1
        count = min(count, len(out) - filled)
        for i in range(count):
            out[filled + i] = (bits_at(data, size, first + i, 1) if packed else first) != 0
        filled += count
        if not in_runs and filled < len(out):
            return -1
        position = after
    return 0


@device
def _stated_bytes(data: Pointer, size: int) -> int:
    """Return the size that is stored in the first four bytes. If there are fewer bytes, return a
    size that is too large."""
    if size < 4:
        return 1 << 32
    stated = 0
    for i in range(4):
        stated |= int(data[i]) << 8 * i
    return stated
