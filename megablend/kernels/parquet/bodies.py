"""Decompressing many page bodies in one call, with the system's own libraries if it has them.

Arrow's codecs need one Python call per page, and create a new context for each.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int64s
from megablend.intrinsics import Pointer, library_function, load64, pointer_at, store64
from megablend.jit import device, kernel

SLACK = 32
"""Words are copied, up to 16 bytes more than needed, where at least so many are left."""


@device
def decode_lz4(address: int, size: int, out_address: int, room: int) -> int:
    """Decode a block; returns its decoded length, -1 if it is damaged or longer than `room`.

    Args:
        address, size: the address of the block, and its size in bytes.
        out_address, room: where it is decoded to, and how many bytes may be written there.
    """
    data = pointer_at(address, size)
    out = pointer_at(out_address, room)
    at = 0
    filled = 0
    while at < size:
        token = np.int64(data[at])
        at, literals = _length(data, at + 1, size, token >> 4)
        if literals > size - at or literals > room - filled:
            return -1
        if literals + SLACK <= min(size - at, room - filled):
            _copy_words(out, filled, data, at, literals)
        else:
            _copy_bytes(out, filled, data, at, literals)
        at += literals
        filled += literals
        if at == size:  # the last sequence has no match
            return filled
        if size - at < 2:
            return -1
        distance = np.int64(data[at]) | np.int64(data[at + 1]) << 8
        at, match = _length(data, at + 2, size, token & 15)
        match += 4
        if distance == 0 or distance > filled or match > room - filled:
            return -1
        if distance >= 8 and match + SLACK <= room - filled:
            _copy_words(out, filled, out, filled - distance, match)
        else:  # what is copied may only just have been written
            _copy_bytes(out, filled, out, filled - distance, match)
        filled += match
    return -1


@device
def _length(data: Pointer, at: int, end: int, length: int) -> tuple[int, int]:
    """The position after a length that began with four bits of a token, and the length; endless
    if the block breaks off."""
    if length == 15:
        more = 255
        while more == 255:
            if at >= end:
                return end, 1 << 40
            more = np.int64(data[at])
            at += 1
            length += more
    return at, length


@device
def _copy_words(to: Pointer, i: int, data: Pointer, j: int, count: int) -> None:
    """Copy bytes, and some more, 16 at a time; the two stretches are at least 8 apart.

    The first 16 are copied even for a count of 0: a branch that nearly always goes the same way
    halves the time of all.
    """
    stop = i + count
    while True:
        store64(to, i, load64(data, j))
        store64(to, i + 8, load64(data, j + 8))
        i += 16
        j += 16
        if i >= stop:
            break


@device
def _copy_bytes(to: Pointer, i: int, data: Pointer, j: int, count: int) -> None:
    for k in range(count):
        to[i + k] = data[j + k]


ZSTD_LIBRARY = "libzstd.so.1"
zstd_decompress = library_function(ZSTD_LIBRARY, "ZSTD_decompressDCtx", "uintp", *["uintp"] * 5)
lz4_decompress = library_function(
    "liblz4.so.1", "LZ4_decompress_safe", "intc", "uintp", "uintp", "intc", "intc"
)


@kernel
def expand_zstd(
    context: int, addresses: Int64s, sizes: Int64s, outs: Int64s, lengths: Int64s
) -> int:
    """Decompress frames of zstd; only if the system has `zstd_decompress`.
    Returns the first that is damaged, or -1.

    Args:
        context: address of a ZSTD_DCtx that is not used by another thread.
        addresses, sizes: int64 [n], addresses of frames in memory, and their sizes.
        outs, lengths: int64 [n], output addresses, and exact decompressed sizes.
    """
    for i in range(len(addresses)):
        if zstd_decompress(context, outs[i], lengths[i], addresses[i], sizes[i]) != lengths[i]:  # type: ignore[misc]
            return i
    return -1


@kernel
def expand_lz4(addresses: Int64s, sizes: Int64s, outs: Int64s, lengths: Int64s) -> int:
    """Decompress blocks of LZ4 with the system's library; only if it has `lz4_decompress`.
    Otherwise like `expand_zstd`."""
    for i in range(len(addresses)):
        if lz4_decompress(addresses[i], outs[i], sizes[i], lengths[i]) != lengths[i]:  # type: ignore[misc]
            return i
    return -1


@kernel
def expand_lz4_plainly(addresses: Int64s, sizes: Int64s, outs: Int64s, lengths: Int64s) -> int:
    """Decompress blocks of LZ4 with our own decoder; otherwise like `expand_zstd`."""
    for i in range(len(addresses)):
        if decode_lz4(addresses[i], sizes[i], outs[i], lengths[i]) != lengths[i]:
            return i
    return -1
