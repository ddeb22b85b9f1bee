"""Cutting ranges of sources where blocks begin: which blocks a range overlaps,
and where in each it begins and ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.intrinsics import bytes_at
from megablend.jit import device, kernel

STRETCH_DTYPE = np.dtype(
    [
        ("epoch", "<i8"),
        ("first", "<i8"),  # position of its first token in the endless concatenation of epochs
        ("tokens", "<i8"),
        ("items", "<i8"),
        # int64 [items + 1], ascending from 0: tokens before each item
        ("offsets", "<i8"),
        # [items], of `entry_bytes` each: the number of an item's block; i of item i for 0 bytes
        ("entries", "<i8"),
        ("entry_bytes", "<i8"),
        ("first_block", "<i8"),  # added to the numbers of blocks
        ("skip", "<i8"),  # added to the places of tokens in the block whose number is 0
    ]
)
"""Blocks that a source reads one after the other; `offsets` and `entries` are addresses."""
Stretches = npt.NDArray[np.void]


@kernel
def count_cuts(stretches: Stretches, places: Int64s, starts: Int64s, stops: Int64s) -> int:
    """How many spans `cut` makes of the same ranges."""
    total = 0
    for i in range(len(starts)):
        stretch = stretches[places[i]]
        start = starts[i] - stretch["first"]
        stop = min(stops[i] - stretch["first"], stretch["tokens"])
        if start < stop:
            offsets = bytes_at(stretch["offsets"], (stretch["items"] + 1) * 8).view(np.int64)
            item = _containing(offsets, start)
            while item + 1 < len(offsets) and offsets[item] < stop:
                total += offsets[item + 1] > offsets[item]
                item += 1
    return total


@kernel
def cut(
    stretches: Stretches, places: Int64s, starts: Int64s, stops: Int64s, out: npt.NDArray[np.int64]
) -> None:
    """Cut ranges where blocks begin; blocks without tokens are skipped.

    Args:
        stretches: STRETCH_DTYPE [num_stretches].
        places: int64 [n], the stretch that each range begins in.
        starts, stops: int64 [n], positions in the endless concatenation of epochs; what is after
            the stretch is left out.
        out: int64 [5, count_cuts(...)], filled, range by range: number of the range, epoch, block,
            first token and stop within the block.
    """
    filled = 0
    for i in range(len(starts)):
        stretch = stretches[places[i]]
        start = starts[i] - stretch["first"]
        stop = min(stops[i] - stretch["first"], stretch["tokens"])
        if start < stop:
            offsets = bytes_at(stretch["offsets"], (stretch["items"] + 1) * 8).view(np.int64)
            size = stretch["entry_bytes"]
            entries = bytes_at(stretch["entries"], stretch["items"] * size)
            item = _containing(offsets, start)
            while item + 1 < len(offsets) and offsets[item] < stop:
                low = offsets[item]
                high = offsets[item + 1]
                if high > low:
                    block = item
                    if size > 0:
                        block = 0
                        for byte in range(size):
                            block |= np.int64(entries[item * size + byte]) << (8 * byte)
                    skip = stretch["skip"] if block == 0 else 0
                    out[0, filled] = i
                    out[1, filled] = stretch["epoch"]
                    out[2, filled] = stretch["first_block"] + block
                    out[3, filled] = max(start, low) - low + skip
                    out[4, filled] = min(stop, high) - low + skip
                    filled += 1
                item += 1


@device
def _containing(offsets: Any, token: int) -> int:
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
