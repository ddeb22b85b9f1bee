"""A keyed permutation of [0, n), computed for many entries at once; and a search for the datasets
that contain given positions.

The permutation is a Feistel network on the least power of two that is at least n, applied until the
result is below n (twice on average at worst). Its halves are 32-bit words and it has no divisions,
so that rounds over a block of entries become vector instructions. It is made for large n: a network
is far from uniform on few entries, and every network on a power of two is an even permutation.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int16s, Int32s, Int64s, Uint32s
from megablend.jit import device, kernel

ROUNDS = 8
_FIRST = np.uint32(0x7FEB352D)
_SECOND = np.uint32(0x846CA68B)
_15 = np.uint32(15)
_16 = np.uint32(16)


@device
def _mix(x: np.uint32) -> np.uint32:
    """Map a 32-bit integer one to one to a random-looking 32-bit integer. Source: Wellons (2018),
    lowbias32."""
    word: np.uint32 = np.uint32(x ^ (x >> _16))
    word = np.uint32(word * _FIRST)
    word = np.uint32(word ^ (word >> _15))
    word = np.uint32(word * _SECOND)
    word ^= word >> _16
    return word


@kernel
def keyed_permutation(start: int, limit: int, keys: Uint32s, out: Int64s) -> None:
    """Fill out, int64 [n], with entries start, start + 1, ... of the permutation of [0, limit) that
    belongs to `keys`.

    Args:
        start: 0 or more; start + n is at most limit.
        limit: 2 to 2^62.
        keys: uint32 [ROUNDS].
    """
    bits = 1
    while limit > 1 << bits:
        bits += 1
    low_bits = bits - bits // 2
    high_mask = np.uint32((1 << bits // 2) - 1)
    low_mask = np.uint32((1 << low_bits) - 1)
    size = len(out)
    high = np.empty(size, np.uint32)
    low = np.empty(size, np.uint32)
    places = np.arange(size)
    for i in range(size):
        high[i] = np.uint32((start + i) >> low_bits)
        low[i] = np.uint32((start + i) & np.int64(low_mask))
    while size > 0:
        for turn in range(0, ROUNDS, 2):
            first = keys[turn]
            second = keys[turn + 1]
            for i in range(size):
                high[i] ^= _mix(np.uint32(low[i] ^ first)) & high_mask
                low[i] ^= _mix(np.uint32(high[i] ^ second)) & low_mask
        walking = 0
        for i in range(size):
            value = np.int64(high[i]) << low_bits | np.int64(low[i])
            place = places[i]
            out[place] = value
            high[walking] = high[i]
            low[walking] = low[i]
            places[walking] = place
            walking += np.int64(value >= limit)
        size = walking


@kernel
def find_owner(
    positions: Int64s, starts: Int64s, shift: int, heads: Int32s, datasets: Int16s, samples: Int64s
) -> None:
    """Find the dataset that contains each position, and the number of the sample in this dataset.

    Args:
        positions: int64 [n], below starts[-1].
        starts: int64 [num_datasets + 1], the position at which each dataset begins; ascending.
        shift: the entry in `heads` for a position is position >> shift.
        heads: the datasets at positions 0, 1 << shift, 2 << shift, ...
        datasets, samples: [n], filled.
    """
    for i in range(len(positions)):
        position = positions[i]
        dataset = heads[position >> shift]
        while position >= starts[dataset + 1]:
            dataset += 1
        datasets[i] = dataset
        samples[i] = position - starts[dataset]
