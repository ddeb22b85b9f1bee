"""Count the positions that a cycle's first slots take below a boundary, without listing them: a
cycle may have 2^40 samples.

At slot p, a lane with first position r + K * t (r < K) takes position r + K * u, u = (t + stride *
p + shift) % b. It is below a boundary if u is below a threshold, and how many of an arithmetic
sequence's remainders are below a threshold is a difference of two sums of floors.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int64s
from megablend.blend.interleavings.lane_schedule import LaneSchedule

_AT_ONCE = 1 << 20
"""Number of pairs of a boundary and a lane that are counted at once."""


def count_below(schedule: LaneSchedule, shift: int, slots: int, boundaries: Int64s) -> Int64s:
    """Return how many of the positions that all lanes take in a cycle's first `slots` slots are
    below each boundary: int64 [n], as `boundaries`, which are 0 to K * b."""
    lanes = len(schedule.firsts)
    turns, residues = np.divmod(schedule.firsts, lanes)
    begin = (turns + shift) % schedule.slots
    below_all = _sum_floors(slots, schedule.slots, schedule.stride, begin)
    counts = np.empty(len(boundaries), np.int64)
    step = max(1, _AT_ONCE // lanes)
    for low in range(0, len(boundaries), step):
        some = boundaries[low : low + step, np.newaxis]
        thresholds = np.clip(-((residues - some) // lanes), 0, schedule.slots)
        # [x % b < t] = x // b - (x - t) // b = x // b + 1 - (x + b - t) // b, where 0 <= t <= b
        offsets = begin + schedule.slots - thresholds
        above = _sum_floors(slots, schedule.slots, schedule.stride, offsets)
        counts[low : low + step] = (below_all + slots - above).sum(axis=1)
    return counts


def _sum_floors(terms: int, divisor: int, factor: int, offsets: Int64s) -> Int64s:
    """Return the sum of (factor * i + offset) // divisor over i = 0, ..., terms - 1 for each
    offset, by Euclid's algorithm; all numbers are at most 2^21, `divisor` is at least 1."""
    total = np.zeros(offsets.shape, np.int64)
    counts = np.full(offsets.shape, terms, np.int64)
    while True:
        total += counts * (counts - 1) // 2 * (factor // divisor)
        factor %= divisor
        total += counts * (offsets // divisor)
        # The lattice points below the line, counted along the other axis
        counts, offsets = np.divmod(factor * counts + offsets % divisor, divisor)
        if not counts.any():
            return total
        divisor, factor = factor, divisor
