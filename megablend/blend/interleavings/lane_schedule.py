"""The positions of a cycle that each lane takes, and their order: the pattern that
megablend.kernels.blend.lanes applies.

A cycle has K lanes and b slots. Its b * K positions are arranged by source, so a step of K samples
holds every source's share if its positions are spread evenly. Divide the cycle into K windows of b
positions. With G = gcd(K, b), lane l starts in window i = bit_reversal_permutation(K)[l], at
firsts[l] = i * b + e, if e < G depends only on i * G // K. These K positions have all K residues
modulo K (i * b takes the K / G multiples of G, each for G values of i), and there is one in each
window. A turn shifts all of them by K, which preserves both properties, so at every slot each
window of b positions (counted from the shifted start) contains exactly one lane: the error of any
source's share is less than 2. Because windows are assigned to lanes by reversed digits, the lanes
of an aligned half or quarter are one to every 2 or 4 windows, and the same bound holds for steps of
K / 2 and K / 4 samples if these are integers. The same holds for K / 2^j samples with any 2^j that
divides K: if K is a power of two, the first t samples of a slot are one such step for each 1 among
t's binary digits, so the sums at any sample are less than 2 log2 K further from the cycle's share
than those at the slot's start. e is also chosen by reversed digits, so that lane l owns residue l
if K divides b.

Over slots the error is the discrepancy of the multiples of a well-chosen stride: sums at the ends
of steps stay within 12 if K is a power of two (measured for K up to 1,024 and b up to 4,096). If K
has a large odd divisor that also divides b, they may not: 25 for K = b = 500, 100 for K = 479 and b
= 958. Committed runs have this order, so it cannot change.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s
from megablend.kernels.blend.strides import golden_stride


class LaneSchedule(NamedTuple):
    """The pattern of a cycle: at slot p, lane l takes position
    (firsts[l] + K * ((stride * p + shift) % b)) % (b * K)."""

    firsts: Int64s
    """The first position of each lane, int64 [K]."""
    stride: int
    slots: int
    """b, the number of slots."""

    def positions(self, slot: int, shift: int) -> Int64s:
        """Return the position of each lane at a slot, int64 [K]."""
        lanes = len(self.firsts)
        turns = (self.stride * slot + shift) % self.slots
        return (self.firsts + lanes * turns) % (lanes * self.slots)

    def samples(self, positions: Int64s, shift: int) -> Int64s:
        """Return the samples of the cycle that take `positions`: the inverse of the formula of
        this class. Both are int64 [n]."""
        lanes = np.argsort(self.firsts % len(self.firsts))[positions % len(self.firsts)]
        turns = (positions - self.firsts[lanes]) // len(self.firsts)
        slots = (turns - shift) * pow(self.stride, -1, self.slots) % self.slots
        return slots * len(self.firsts) + lanes


@lru_cache(maxsize=16)
def make_lane_schedule(lanes: int, slots: int) -> LaneSchedule:
    """Make the pattern of a cycle of `lanes` lanes and `slots` slots, both at least 1."""
    windows = bit_reversal_permutation(lanes)
    common = math.gcd(lanes, slots)
    offsets = np.argsort(bit_reversal_permutation(common))
    firsts = windows * slots + offsets[windows * common // lanes]
    return LaneSchedule(firsts, int(golden_stride(slots, lanes)), slots)


def bit_reversal_permutation(size: int) -> Int64s:
    """Return a permutation of [0, size), int64 [size], that moves neighbours far apart: bit
    reversal if `size` is a power of two.

    With size = 2^a * m, m odd, l = m * high + low goes to (high's a digits reversed) + 2^a
    * (rank of low among all reversed low's): of every 2 (4) neighbours, one belongs to
    each aligned half (quarter).
    """
    twos = (size & -size).bit_length() - 1
    odd = size >> twos
    high, low = np.divmod(np.arange(size), odd)
    ranks = np.argsort(np.argsort(_reversed_bits(np.arange(odd), (odd - 1).bit_length())))
    return _reversed_bits(high, twos) + (ranks[low] << twos)


def _reversed_bits(numbers: Int64s, width: int) -> Int64s:
    """Return numbers of `width` bits with their bits in reverse order: int64 [n]."""
    reverse = np.zeros_like(numbers)
    for bit in range(width):
        reverse |= (numbers >> bit & 1) << (width - 1 - bit)
    return reverse
