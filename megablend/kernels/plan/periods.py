"""The period of a source: the cycles over which its ordinals are dealt to the lanes in runs of neighbours.

A period belongs to one epoch of the source, and ends after `span` cycles, with the epoch, or with the stage's last full cycle,
whichever comes first; periods are counted from the cycle in which the epoch begins, or from the stage's start. A cut cycle is a
period of its own. In a cycle in which an epoch ends, the source's positions are ranked by residue, so by lane: the first ones are
the old epoch's, the others the new one's. Thus epochs are mixed within one cycle at most.

How many samples of the new epoch come before the old one's last: say that the cycle has n samples of the source, b of them of the
old epoch. Both kinds are spread evenly over its slots, so when b of the source are read, about b * (n - b) / n <= n / 4 of them
are of the new epoch; if the old ones stray from an even spread by d and the new ones by d', by b / n * d' - (n - b) / n * d
more, which is at most the larger of the two.

`epoch_tokens` of 0 stands for a source whose epochs are not regarded: all of it is one epoch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import device, kernel
from megablend.kernels.plan.tree import leaf_counts, least_multiple

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

BEGIN, END, EPOCH, PURE_BEGIN, PURE_END, ORDINAL, LOW, HIGH, HEAD = range(9)
"""What is kept of a period: its cycles; its epoch; those of its cycles that have no other epoch; its first ordinal; the first of
its ranks in its first cycle, and the end of its ranks in its last cycle."""
ALL = 1 << 62
"""An ordinal beyond all."""


@kernel
def period_of(
    left_leaves: Int32s,
    left_samples: Int64s,
    leaf_samples: Int64s,
    rank: int,
    leaf_ordinal: int,
    step: int,
    cycle: int,
    span: int,
    ordinal: int,
    epoch_tokens: int,
    sample_tokens: int,
) -> tuple[int, int]:
    """The period [begin, end) that has an ordinal, which is one of cycle `cycle` by the counts at its edges.

    Of a stage whose tree is all there is: leaf_samples int64 [size], by rank. Others as `find_period` has them.
    """
    size, total, leaf_total = len(leaf_samples), int(leaf_samples.sum()), int(leaf_samples[rank])
    epoch_first = 0
    if epoch_tokens > 0:
        epoch_first = epoch_start(epoch_of(ordinal, epoch_tokens, sample_tokens), epoch_tokens, sample_tokens)
    return find_period(
        left_leaves, left_samples, 0, size, total, rank, leaf_total, leaf_ordinal, step, cycle, span, epoch_first
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
    step: int,
    cycle: int,
    span: int,
    epoch_first: int,
) -> tuple[int, int]:
    """The cycles [begin, end) of the period that has a leaf's samples of an epoch in cycle `cycle`; the last may have none.

    Of the stage: the tree, which begins at `first`; total, its samples; step, those of a cycle. Of the leaf: leaf_total, its
    samples; leaf_ordinal, the source's ordinal with which the stage begins. epoch_first: the first ordinal of the epoch.
    """
    full = int(total) // int(step)  # cycles; a cut one is not counted
    if cycle >= full:
        return cycle, cycle + 1
    begin, before = 0, int(epoch_first) - int(leaf_ordinal)
    if before > 0 and span > 1:
        begin = least_multiple(left_leaves, left_samples, first, size, total, leaf_total, rank, before + 1, step) - 1
    begin = cycle - (cycle - begin) % span
    return begin, min(begin + span, full)


@device
def enter_period(
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
    position: int,
    span: int,
    epoch_tokens: int,
    sample_tokens: int,
    heads: Int64s,
    parts: Int64s,
    at: int,
) -> int:
    """The period of a position of a leaf in cycle `cycle`: which of the two that are kept of a leaf, by the parity of its epoch.

    Where it is not kept yet, it fills row `at` of heads int64 [2, num_leaves, HEAD]; and of parts int64 [2, num_leaves, span, 4]:
    for each of the period's cycles the leaf's positions [left, right), both divided by the lanes. Others as in `find_period`.
    """
    lanes, step = int(lanes), int(lanes) * int(slots)
    dealt = int(total) - int(total) % lanes
    epoch, epoch_first, epoch_stop = 0, 0, ALL
    if epoch_tokens > 0:
        stop = min((cycle + 1) * step, dealt)
        pace = float(leaf_total) / float(total)  # counts are within 2 of the share
        least = leaf_ordinal + max(0, int(float(cycle * step) * pace) - 3)
        epoch = epoch_of(least, epoch_tokens, sample_tokens)
        if epoch_of(leaf_ordinal + int(float(stop) * pace) + 3, epoch_tokens, sample_tokens) != epoch:
            passed, seen = leaf_counts(left_leaves, left_samples, first, size, total, cycle * step, rank)
            passed_stop, seen_stop = leaf_counts(left_leaves, left_samples, first, size, total, stop, rank)
            left = passed_stop - passed
            right = left + seen_stop - seen
            before, _, own = count_ranks(left // lanes, left % lanes, right // lanes, right % lanes, position % lanes)
            ordinal = leaf_ordinal + seen + before + position // lanes - own
            epoch = epoch_of(ordinal, epoch_tokens, sample_tokens)
        epoch_first = epoch_start(epoch, epoch_tokens, sample_tokens)
        epoch_stop = epoch_start(epoch + 1, epoch_tokens, sample_tokens)
    which = epoch % 2
    if heads[which, at, EPOCH] == epoch and heads[which, at, BEGIN] <= cycle < heads[which, at, END]:
        return which

    fill_period(
        left_leaves,
        left_samples,
        first,
        size,
        total,
        rank,
        leaf_total,
        leaf_ordinal,
        lanes,
        slots,
        cycle,
        span,
        epoch,
        epoch_first,
        epoch_stop,
        heads[which, at],
        parts[which, at],
    )
    return which


@device
def fill_period(
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
    epoch: int,
    epoch_first: int,
    epoch_stop: int,
    head: Int64s,
    parts: Int64s,
) -> None:
    """Fill head int64 [HEAD] and parts int64 [span, 4] with the period that has a leaf's samples of an epoch in cycle `cycle`.

    Of the epoch: its first ordinal, and the next one's. Others as in `enter_period`.
    """
    step = int(lanes) * int(slots)
    dealt = int(total) - int(total) % int(lanes)
    begin, end = find_period(
        left_leaves,
        left_samples,
        first,
        size,
        total,
        rank,
        leaf_total,
        leaf_ordinal,
        step,
        cycle,
        span,
        epoch_first,
    )
    passed, seen = leaf_counts(left_leaves, left_samples, first, size, total, begin * step, rank)
    low = max(0, epoch_first - leaf_ordinal - seen)
    head[ORDINAL] = leaf_ordinal + seen + low
    high, other = 0, begin
    while other < end and leaf_ordinal + seen < epoch_stop:
        stop = min((other + 1) * step, dealt)
        passed_stop, seen_stop = leaf_counts(left_leaves, left_samples, first, size, total, stop, rank)
        left = passed_stop - passed  # the leaf's positions in that cycle are [left, right)
        right = left + seen_stop - seen
        high = min(right - left, epoch_stop - leaf_ordinal - seen)
        part = parts[other - begin]
        part[0], part[1], part[2], part[3] = left // lanes, left % lanes, right // lanes, right % lanes
        passed, seen, other = passed_stop, seen_stop, other + 1
    head[BEGIN], head[END], head[EPOCH] = begin, other, epoch
    head[LOW], head[HIGH] = low, high
    head[PURE_BEGIN] = begin + (low > 0)
    head[PURE_END] = other - (leaf_ordinal + seen > epoch_stop)


@device
def count_ranks(left: int, left_rest: int, right: int, right_rest: int, residue: int) -> tuple[int, int, int]:
    """Of a source's positions in a cycle: (those of smaller residues, those of `residue`, the first turn of these)."""
    before = (right - left) * residue + min(right_rest, residue) - min(left_rest, residue)
    first = left + (left_rest > residue)
    return before, right + (right_rest > residue) - first, first


@device
def epoch_of(ordinal: int, epoch_tokens: int, sample_tokens: int) -> int:
    """The epoch in which a sample begins."""
    return int(ordinal) * int(sample_tokens) // int(epoch_tokens)


@device
def epoch_start(epoch: int, epoch_tokens: int, sample_tokens: int) -> int:
    """The first ordinal whose sample begins in an epoch, or later."""
    return (int(epoch) * int(epoch_tokens) + int(sample_tokens) - 1) // int(sample_tokens)
