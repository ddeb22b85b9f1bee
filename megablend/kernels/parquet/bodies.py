"""Decompressing many page bodies in one call, with the system's own libraries if it has them.

Arrow's codecs need one Python call per page, and create a new context for each.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int64s
from megablend.intrinsics import Pointer, library_function, load64, pointer_at, store64
from megablend.jit import device, kernel

SLACK = 32
"""Bytes are copied in words, up to 16 bytes more than needed, if at least this many more fit."""


@device
def decode_lz4(address: int, size: int, out_address: int, room: int) -> int:
    """Decode a block; returns its decoded size, or -1 if it is damaged or larger than `room`.

    Args:
        address, size: address of the block in memory, and its size in bytes.
        out_address, room: address to write to, and how many bytes may be written there.
    """
    data = pointer_at(address, size)
    out = pointer_at(out_address, room)
    position = 0
    filled = 0
    while position < size:
        token = np.int64(data[position])
        position, literal_bytes = _length(data, position + 1, size, token >> 4)
        if literal_bytes > size - position or literal_bytes > room - filled:
            return -1
        if literal_bytes + SLACK <= min(size - position, room - filled):
            _copy_words(out, filled, data, position, literal_bytes)
        else:
            _copy_bytes(out, filled, data, position, literal_bytes)
        position += literal_bytes
        filled += literal_bytes
        # The last sequence has no match
        if position == size:
            return filled
        if size - position < 2:
            return -1
        distance = np.int64(data[position]) | np.int64(data[position + 1]) << 8
        position, match_bytes = _length(data, position + 2, size, token & 15)
        match_bytes += 4
        if distance == 0 or distance > filled or match_bytes > room - filled:
            return -1
        if distance >= 8 and match_bytes + SLACK <= room - filled:
            _copy_words(out, filled, out, filled - distance, match_bytes)
        else:
            # The match may overlap with what it is copied to
            _copy_bytes(out, filled, out, filled - distance, match_bytes)
        filled += match_bytes
    return -1


@device
def _length(data: Pointer, position: int, end: int, length: int) -> tuple[int, int]:
    """Read the rest of a length, given the four bits of it in the token. Returns the position after
    it, and the length; one that no block has if the bytes end too early."""
    if length == 15:
        more = 255
        while more == 255:
            if position >= end:
                return end, 1 << 40
            more = np.int64(data[position])
            position += 1
            length += more
    return position, length


@device
def _copy_words(to: Pointer, i: int, data: Pointer, j: int, count: int) -> None:
    """Copy `count` bytes from data[j] to to[i], 16 at a time and so some more; source and target
    are at least 8 bytes apart.

    The first 16 are copied even if `count` is 0: without that branch, it takes half the time.
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
    """Decompress frames of zstd by the system's library: only if `zstd_decompress` is not None.
    Returns the number of the first frame that is damaged or has another size, or -1.

    Args:
        context: address of a ZSTD_DCtx that no other thread uses.
        addresses, sizes: int64 [n], address in memory and size of each frame.
        outs, lengths: int64 [n], address to write to, and exact decompressed size.
    """
    for i in range(len(addresses)):
        if zstd_decompress(context, outs[i], lengths[i], addresses[i], sizes[i]) != lengths[i]:  # type: ignore[misc]
            return i
    return -1


@kernel
def expand_lz4(addresses: Int64s, sizes: Int64s, outs: Int64s, lengths: Int64s) -> int:
    """Decompress blocks of LZ4 by the system's library: only if `lz4_decompress` is not None. Args
    and result are those of `expand_zstd`."""
    for i in range(len(addresses)):
        if lz4_decompress(addresses[i], outs[i], sizes[i], lengths[i]) != lengths[i]:  # type: ignore[misc]
            return i
    return -1


@kernel
def expand_lz4_plainly(addresses: Int64s, sizes: Int64s, outs: Int64s, lengths: Int64s) -> int:
    """Decompress blocks of LZ4 by `decode_lz4`. Args and result are those of `expand_zstd`."""
    for i in range(len(addresses)):
        if decode_lz4(addresses[i], sizes[i], outs[i], lengths[i]) != lengths[i]:
            return i
    return -1
