"""The period of a source: the cycles over which its ordinals are dealt to the lanes in runs of neighbours.

A period ends after `span` cycles, with the stage's last full cycle, or before the cycle in which an epoch of the source ends,
whichever comes first. The cycle in which an epoch ends is a period of its own, and so is the cut cycle. Therefore samples of two
epochs are mixed within one cycle at most. Periods are counted from the stage's start or from the last epoch's end.

The cycle in which an epoch ends is found from the source's share of the stage: its count is within 2 of that at any sample.

`epoch_tokens` of 0 stands for a source whose epochs are not regarded: its periods begin at multiples of `span`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import device, kernel
from megablend.kernels.bijection import permuted
from megablend.kernels.mixing import fold
from megablend.kernels.tree import leaf_counts, least_multiple

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@kernel
def period_of(
    left_leaves: Int32s,
    left_samples: Int64s,
    leaf_samples: Int64s,
    rank: int,
    leaf_ordinal: int,
    lanes: int,
    slots: int,
    cycle: int,
    span: int,
    epoch_tokens: int,
    sample_tokens: int,
) -> tuple[int, int]:
    """As `find_period` does, for a stage whose tree is all there is: leaf_samples int64 [size], by rank."""
    return find_period(
        left_leaves,
        left_samples,
        0,
        len(leaf_samples),
        int(leaf_samples.sum()),
        rank,
        int(leaf_samples[rank]),
        leaf_ordinal,
        lanes,
        slots,
        cycle,
        span,
        epoch_tokens,
        sample_tokens,
    )


@device
def find_period(
    left_leaves: Int32s,
    left_samples: Int64s,
    first: int,
    size: int,
    total: int,
    rank: int,
    leaf_total: int,
    leaf_ordinal: int,
    lanes: int,
    slots: int,
    cycle: int,
    span: int,
    epoch_tokens: int,
    sample_tokens: int,
) -> tuple[int, int]:
    """The cycles [begin, end) of the period in which cycle `cycle` of a stage lies, for leaf `rank`.

    Of the stage: the tree, which begins at `first`; total, its samples. Of the leaf: leaf_total, its samples; leaf_ordinal, the
    source's ordinal with which the stage begins.
    """
    step = int(lanes) * int(slots)
    full = int(total) // step  # cycles; a cut one is not counted
    if cycle >= full or span == 1:
        return cycle, cycle + 1
    if epoch_tokens == 0:
        begin = cycle - cycle % span
        return begin, min(begin + span, full)
    _, low = leaf_counts(left_leaves, left_samples, first, size, total, cycle * step, rank)
    _, high = leaf_counts(left_leaves, left_samples, first, size, total, (cycle + 1) * step, rank)
    epoch = epoch_of(leaf_ordinal + low, epoch_tokens, sample_tokens)
    if epoch_of(leaf_ordinal + high, epoch_tokens, sample_tokens) != epoch:
        return cycle, cycle + 1
    begin = 0
    before = epoch_start(epoch, epoch_tokens, sample_tokens) - leaf_ordinal  # the stage's samples of earlier epochs
    if before > 0:
        begin = least_multiple(left_leaves, left_samples, first, size, total, leaf_total, rank, before, step)
    begin = cycle - (cycle - begin) % span
    end = min(begin + span, full)
    after = epoch_start(epoch + 1, epoch_tokens, sample_tokens) - leaf_ordinal
    if leaf_counts(left_leaves, left_samples, first, size, total, end * step, rank)[1] >= after:
        end = least_multiple(left_leaves, left_samples, first, size, total, leaf_total, rank, after, step) - 1
    return begin, end


@device
def epoch_of(ordinal: int, epoch_tokens: int, sample_tokens: int) -> int:
    """The epoch in which a sample begins."""
    return int(ordinal) * int(sample_tokens) // int(epoch_tokens)


@device
def epoch_start(epoch: int, epoch_tokens: int, sample_tokens: int) -> int:
    """The first ordinal whose sample begins in an epoch, or later."""
    return (int(epoch) * int(epoch_tokens) + int(sample_tokens) - 1) // int(sample_tokens)


@device
def permuted_by_epoch(i: int, ordinal: int, n: int, key: int, epoch_tokens: int, sample_tokens: int) -> int:
    """Entry i of a permutation of [0, n) in which samples of one epoch change places among themselves alone.

    They have the ordinals from `ordinal` on. Since a lane's entries are spread evenly over the slots of a cycle, so are those of
    each epoch: how many come too early is no matter of chance.
    """
    epoch = epoch_of(ordinal + i, epoch_tokens, sample_tokens)
    low = max(0, epoch_start(epoch, epoch_tokens, sample_tokens) - ordinal)
    high = min(n, epoch_start(epoch + 1, epoch_tokens, sample_tokens) - ordinal)
    return low + permuted(i - low, high - low, fold(key, epoch))
