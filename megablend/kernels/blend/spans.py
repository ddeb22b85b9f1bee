"""Cut ranges of a source's tokens at block boundaries: find the blocks that a range overlaps, and
its first and last token in each of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.intrinsics import bytes_at
from megablend.jit import kernel

STRETCH_DTYPE = np.dtype(
    [
        ("epoch", "<i8"),
        ("first", "<i8"),  # position of its first token in the endless concatenation of epochs
        ("tokens", "<i8"),
        ("items", "<i8"),
        # int64 [items + 1], ascending from 0: tokens before each item
        ("offsets", "<i8"),
        # [items], of `entry_bytes` each: the number of an item's block
        ("entries", "<i8"),
        ("entry_bytes", "<i8"),
        ("first_block", "<i8"),  # added to the numbers of blocks
        ("skip", "<i8"),  # added to the places of tokens in the block whose number is 0
    ]
)
"""A stretch: blocks of a source that are read one after another. `offsets` and `entries` are
addresses of arrays."""
Stretches = npt.NDArray[np.void]


@kernel
def cut(
    stretches: Stretches, numbers: Int64s, starts: Int64s, stops: Int64s, out: npt.NDArray[np.int64]
) -> int:
    """Cut ranges of tokens at block boundaries. Blocks without tokens are skipped.

    Args:
        stretches: STRETCH_DTYPE [num_stretches].
        numbers: int64 [n], the number of the stretch in which each range begins.
        starts, stops: int64 [n], first token and stop of each range in the endless concatenation of
            epochs. The part of a range after its stretch is left out.
        out: int64 [5, m], is filled with the first m spans, range by range: number of the range,
            epoch, block, first token and stop within the block.

    Returns: the number of spans.
    """
    num_spans = 0
    for i in range(len(starts)):
        stretch = stretches[numbers[i]]
        start = starts[i] - stretch["first"]
        stop = min(stops[i] - stretch["first"], stretch["tokens"])
        if start < stop:
            offsets = bytes_at(stretch["offsets"], (stretch["items"] + 1) * 8).view(np.int64)
            entry_bytes = stretch["entry_bytes"]
            entries = bytes_at(stretch["entries"], stretch["items"] * entry_bytes)
            item = np.searchsorted(offsets, start, side="right") - 1
            while item + 1 < len(offsets) and offsets[item] < stop:
                low = offsets[item]
                high = offsets[item + 1]
                if high > low:
                    if num_spans < out.shape[1]:
                        block = 0
                        for byte in range(entry_bytes):
                            block |= np.int64(entries[item * entry_bytes + byte]) << (8 * byte)
                        skip = stretch["skip"] if block == 0 else 0
                        out[0, num_spans] = i
                        out[1, num_spans] = stretch["epoch"]
                        out[2, num_spans] = stretch["first_block"] + block
                        out[3, num_spans] = max(start, low) - low + skip
                        out[4, num_spans] = min(stop, high) - low + skip
                    num_spans += 1
                item += 1
    return num_spans
