"""Decode a block of LZ4 without the system's library.

Source: lz4, doc/lz4_Block_format.md.
"""

from __future__ import annotations

import numpy as np

from megablend.intrinsics import Pointer, load64, pointer_at, store64
from megablend.jit import device

SLACK = 32
"""If there is room for this number of bytes beyond those needed, bytes are copied in words, which
writes up to 16 bytes too many."""


@device
def decode_lz4(address: int, size: int, out_address: int, room: int) -> int:
    """Decode a block. Returns its decoded size, or -1 if it is damaged or larger than `room`.

    A block is a list of sequences. Each has a token (a byte with two lengths), literals, and a
    match: the distance back to the earlier output that is copied.

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
            # The match may overlap with its copy
            _copy_bytes(out, filled, out, filled - distance, match_bytes)
        filled += match_bytes
    return -1


@device
def _length(data: Pointer, position: int, end: int, length: int) -> tuple[int, int]:
    """Read the rest of a length, given its four bits in the token. Returns the position after it,
    and the length; if the bytes end too early, the length is too large for any block."""
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
def _copy_words(out: Pointer, filled: int, data: Pointer, position: int, count: int) -> None:
    """Copy bytes from data[position] to out[filled]: `count`, rounded up to a multiple of 16.
    Source and target must be at least 8 bytes apart.

    The first 16 bytes are copied even if `count` is 0: a check for that would double the time.
    """
    stop = filled + count
    while True:
        store64(out, filled, load64(data, position))
        store64(out, filled + 8, load64(data, position + 8))
        filled += 16
        position += 16
        if filled >= stop:
            break


@device
def _copy_bytes(out: Pointer, filled: int, data: Pointer, position: int, count: int) -> None:
    for i in range(count):
        out[filled + i] = data[position + i]
