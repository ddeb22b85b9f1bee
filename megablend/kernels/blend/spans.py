"""Cutting ranges out of concatenated items: which items a range overlaps,
and where in each it begins and ends."""

from __future__ import annotations

from megablend.arrays import Int64s
from megablend.jit import device, kernel


@kernel
def count_cuts(offsets: Int64s, starts: Int64s, stops: Int64s) -> int:
    """How many spans `cut` makes of the same ranges."""
    total = 0
    for i in range(len(starts)):
        if starts[i] < stops[i]:
            first = _containing(offsets, starts[i])
            while first + 1 < len(offsets) and offsets[first] < stops[i]:
                total += offsets[first + 1] > offsets[first]
                first += 1
    return total


@kernel
def cut(offsets: Int64s, starts: Int64s, stops: Int64s, out: Int64s) -> None:
    """Cut ranges where items begin; items without tokens are skipped.

    Args:
        offsets: int64 [num_things + 1], ascending from 0.
        starts, stops: int64 [n], from 0 to offsets[-1].
        out: int64 [4, count_cuts(...)], filled, range by range: number of the range, number of the
            item, first token and stop within the item.
    """
    filled = 0
    for i in range(len(starts)):
        if starts[i] < stops[i]:
            thing = _containing(offsets, starts[i])
            while thing + 1 < len(offsets) and offsets[thing] < stops[i]:
                low = offsets[thing]
                high = offsets[thing + 1]
                if high > low:
                    out[0, filled] = i
                    out[1, filled] = thing
                    out[2, filled] = max(starts[i], low) - low
                    out[3, filled] = min(stops[i], high) - low
                    filled += 1
                thing += 1


@device
def _containing(offsets: Int64s, token: int) -> int:
    """The last item that begins at `token` or before."""
    low = 0
    high = len(offsets) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if offsets[middle] <= token:
            low = middle
        else:
            high = middle
    return low
