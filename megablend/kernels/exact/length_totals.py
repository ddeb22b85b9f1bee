"""Compute the minimum and the sum of sequence lengths, and a checksum that depends on their order,
in one pass.

checksum = the sum, over all positions i and modulo 2^32, of mix(length + GOLDEN * i), where `mix`
is the finalizer of MurmurHash3 (Appleby). Checksums of pieces add up to the checksum of the whole,
so lengths may be read in pieces of any size; `mix` is one to one, so a single length that changes
always changes the checksum. numpy's minimum and sum and zlib's CRC-32 take five times as long.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int32s
from megablend.jit import kernel

_GOLDEN = np.uint32(0x9E3779B9)
_FIRST = np.uint32(0x85EBCA6B)
_SECOND = np.uint32(0xC2B2AE35)
_13 = np.uint32(13)
_16 = np.uint32(16)
_CHUNK = 2048
"""Number of lengths that are processed at a time by two loops, one of 32-bit operations and one of
64-bit sums. They stay in the first-level cache in between."""


@kernel
def total_lengths(lengths: Int32s, position: int) -> tuple[int, int, int]:
    """Return the smallest length, or 0 if no length is negative; the sum of the lengths; and their
    checksum.

    Args:
        lengths: int32 [n], tokens.
        position: position of the first length, 0 or more; only its value modulo 2^32 counts.
    """
    least = np.int32(0)
    total = np.int64(0)
    checksum = np.uint32(0)
    for begin in range(0, len(lengths), _CHUNK):
        chunk = lengths[begin : begin + _CHUNK]
        # Without compiling, numpy refuses integers of more than 32 bits
        start = np.uint32((position + begin) & 0xFFFFFFFF)
        for i in range(len(chunk)):
            least = min(least, chunk[i])
            word = np.uint32(
                np.uint32(chunk[i]) + np.uint32(np.uint32(start + np.uint32(i)) * _GOLDEN)
            )
            word = np.uint32(np.uint32(word ^ (word >> _16)) * _FIRST)
            word = np.uint32(np.uint32(word ^ (word >> _13)) * _SECOND)
            checksum = np.uint32(checksum + np.uint32(word ^ (word >> _16)))
        for i in range(len(chunk)):
            total += np.int64(chunk[i])
    return np.int64(least), total, np.int64(checksum)
