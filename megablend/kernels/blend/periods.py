"""The period of a source: the cycles over which its ordinals are dealt to the lanes in runs of
neighbours.

A period belongs to one epoch of the source, and ends after `span` cycles, with the epoch, or with
the stage's last full cycle, whichever comes first; periods are counted from the cycle in which the
epoch begins, or from the stage's start. A cut cycle is a period of its own. In a cycle in which an
epoch ends, the source's positions are ranked by residue, so by lane: the first ones are the old
epoch's, the others the new one's. Thus epochs are mixed within one cycle at most.

How many samples of the new epoch come before the old one's last: say that the cycle has n samples
of the source, b of them of the old epoch; the others are of the new one, or of those after it. Of
the first b that are read, say that o are old; then b - o are new, and b - o old ones are still to
come. So b - o <= min(b, n - b) <= n / 2 in any order. With o = b * b / n + d it is b * (n - b) / n
- d <= n / 4 - d, where d says by how much the old ones among the first b stray from an even spread
  over the cycle: by few samples, since positions with neighbouring residues are spread evenly over
  its slots.

`epoch_tokens` of 0 stands for a source whose epochs are not regarded: all of it is one epoch.
"""

from __future__ import annotations

from typing import NamedTuple

from megablend.arrays import Int32s, Int64s
from megablend.jit import device, kernel
from megablend.kernels.blend.bijection import permuted
from megablend.kernels.blend.keyed_hash import hash_combine
from megablend.kernels.blend.tree import leaf_counts, least_multiple

BEGIN, END, EPOCH, PURE_BEGIN, PURE_END, ORDINAL, LOW, HIGH, HEAD = range(9)
"""What is kept of a period: its cycles; its epoch; those of its cycles that have no other epoch;
its first ordinal; the first of its ranks in its first cycle, and the end of its ranks in its last
cycle."""
ALL = 1 << 62
"""Larger than any ordinal."""


class Stage(NamedTuple):
    """A stage: its tree, and how it is cut into cycles."""

    left_leaves: Int32s
    left_samples: Int64s
    total: int
    """Number of samples."""
    dealt: int
    """Samples of its cycles, the cut one included; what follows is the tail."""
    lanes: int
    step: int
    """Samples of a full cycle."""


class Leaf(NamedTuple):
    """A source in a stage."""

    rank: int
    total: int
    """Number of samples."""
    first_token: int
    """Where the source's first sample of the stage begins, counted over all its epochs."""
    span: int
    """Cycles of a full period."""
    epoch_tokens: int
    sample_tokens: int
    """Tokens by which samples advance."""


@device
def make_leaf(
    rank: int,
    leaf_samples: Int64s,
    leaf_tokens: Int64s,
    leaf_spans: Int64s,
    leaf_epochs: Int64s,
    sample_tokens: int,
) -> Leaf:
    """One of the leaves, whose arrays are by rank: int64 [num_leaves] each."""
    return Leaf(
        rank,
        int(leaf_samples[rank]),
        int(leaf_tokens[rank]),
        int(leaf_spans[rank]),
        int(leaf_epochs[rank]),
        int(sample_tokens),
    )


@device
def make_stage(
    left_leaves: Int32s, left_samples: Int64s, total: int, lanes: int, slots: int
) -> Stage:
    """A stage of `total` samples, whose lanes have `slots` samples in a full cycle."""
    total = int(total)
    lanes = int(lanes)
    return Stage(left_leaves, left_samples, total, total - total % lanes, lanes, lanes * int(slots))


@kernel
def period_of(
    left_leaves: Int32s,
    left_samples: Int64s,
    total: int,
    lanes: int,
    slots: int,
    rank: int,
    leaf_total: int,
    first_token: int,
    span: int,
    epoch_tokens: int,
    sample_tokens: int,
    cycle: int,
    ordinal: int,
) -> tuple[int, int]:
    """The period [begin, end) that has an ordinal, which is one of cycle `cycle` by the counts at
    its edges.

    Of the stage and the leaf, see `Stage` and `Leaf`. Ordinals are counted from the stage's start.
    """
    stage = make_stage(left_leaves, left_samples, total, lanes, slots)
    leaf = Leaf(rank, leaf_total, first_token, span, epoch_tokens, sample_tokens)
    epoch_first = 0
    if epoch_tokens > 0:
        epoch_first = epoch_start(leaf, epoch_of(leaf, ordinal))
    return find_period(stage, leaf, cycle, epoch_first)


@device
def find_period(stage: Stage, leaf: Leaf, cycle: int, epoch_first: int) -> tuple[int, int]:
    """The cycles [begin, end) of the period that has a leaf's samples of an epoch in cycle `cycle`;
    the last may have none.

    epoch_first: the first ordinal of the epoch.
    """
    full = int(stage.total) // int(stage.step)  # cycles; a cut one is not counted
    if cycle >= full:
        return cycle, cycle + 1
    begin = 0
    before = int(epoch_first)
    if before > 0 and leaf.span > 1:
        begin = (
            least_multiple(
                stage.left_leaves,
                stage.left_samples,
                stage.total,
                leaf.total,
                leaf.rank,
                before + 1,
                stage.step,
            )
            - 1
        )
    begin = cycle - (cycle - begin) % leaf.span
    return begin, min(begin + leaf.span, full)


@device
def enter_period(
    stage: Stage,
    leaf: Leaf,
    cycle: int,
    epoch: int,
    epoch_first: int,
    epoch_stop: int,
    heads: Int64s,
    parts: Int64s,
) -> int:
    """The period of an epoch's ordinals [epoch_first, epoch_stop) in cycle `cycle`: which of the
    two that are kept of a leaf, by the parity of the epoch.

    Where it is not kept yet, it fills row `rank` of heads int64 [2, num_leaves, HEAD] and of parts
    int64 [2, num_leaves, span, 4]; see `fill_period`.
    """
    which = epoch % 2
    rank = leaf.rank
    if (
        heads[which, rank, EPOCH] != epoch
        or not heads[which, rank, BEGIN] <= cycle < heads[which, rank, END]
    ):
        begin, end = find_period(stage, leaf, cycle, epoch_first)
        heads[which, rank, EPOCH] = epoch
        fill_period(stage, leaf, begin, end, epoch_first, epoch_stop, which, heads, parts)
    return which


@device
def fill_period(
    stage: Stage,
    leaf: Leaf,
    begin: int,
    end: int,
    epoch_first: int,
    epoch_stop: int,
    which: int,
    heads: Int64s,
    parts: Int64s,
) -> None:
    """Fill in the period [begin, end) of an epoch's ordinals [epoch_first, epoch_stop), which may
    end it earlier.

    Of each of its cycles, parts has the leaf's positions [left, right), both divided by the lanes:
    quotient and rest of each.
    """
    left_leaves = stage.left_leaves
    left_samples = stage.left_samples
    total = stage.total
    rank = leaf.rank
    lanes = stage.lanes
    before, seen = leaf_counts(left_leaves, left_samples, total, begin * stage.step, rank)
    low = max(0, epoch_first - seen)
    high = 0
    cycle = begin
    heads[which, rank, ORDINAL] = seen + low
    while cycle < end and seen < epoch_stop:
        stop = min((cycle + 1) * stage.step, stage.dealt)
        before_stop, seen_stop = leaf_counts(left_leaves, left_samples, total, stop, rank)
        left = before_stop - before
        right = left + seen_stop - seen
        high = min(right - left, epoch_stop - seen)
        part = parts[which, rank, cycle - begin]
        part[0] = left // lanes
        part[1] = left % lanes
        part[2] = right // lanes
        part[3] = right % lanes
        before = before_stop
        seen = seen_stop
        cycle = cycle + 1
    heads[which, rank, BEGIN] = begin
    heads[which, rank, END] = cycle
    heads[which, rank, LOW] = low
    heads[which, rank, HIGH] = high
    heads[which, rank, PURE_BEGIN] = begin + (low > 0)
    heads[which, rank, PURE_END] = cycle - (seen > epoch_stop)


@device
def ordinal_in_period(
    lanes: int,
    rank: int,
    cycle: int,
    position: int,
    key: int,
    which: int,
    heads: Int64s,
    parts: Int64s,
) -> int:
    """The ordinal of a leaf's position in a cycle of a period that has been entered.

    Ranks, those of earlier lanes first, are cut to the period's epoch in its first and last cycle.

    Args:
        key: of the cycle, the source and the lane: it orders the lane's part of the cycle.
    """
    turn = position // lanes
    residue = position % lanes
    begin = int(heads[which, rank, BEGIN])
    end = int(heads[which, rank, END])
    mixed = heads[which, rank, PURE_BEGIN] > begin or heads[which, rank, PURE_END] < end
    ordinal = int(heads[which, rank, ORDINAL])
    for other in range(begin, end):
        left, left_rest, right, right_rest = parts[which, rank, other - begin]
        before, mine, first = count_ranks(left, left_rest, right, right_rest, residue)
        place = before + turn - first
        after = before + mine
        if mixed:
            count = (right - left) * lanes + right_rest - left_rest
            lowest = int(heads[which, rank, LOW]) if other == begin else 0
            highest = int(heads[which, rank, HIGH]) if other == end - 1 else count
            before = min(max(before, lowest), highest)
            after = min(max(after, lowest), highest)
            ordinal -= lowest
            if other == cycle and highest - lowest < count:
                key = hash_combine(key, heads[which, rank, EPOCH])
        ordinal += before
        if other < cycle:
            ordinal += after - before
        elif other == cycle:
            ordinal += permuted(place - before, after - before, key)
    return ordinal


@device
def count_ranks(
    left: int, left_rest: int, right: int, right_rest: int, residue: int
) -> tuple[int, int, int]:
    """Count a source's positions in a cycle: (with smaller residues, with `residue`, first turn of
    the latter)."""
    before = (right - left) * residue + min(right_rest, residue) - min(left_rest, residue)
    first = left + (left_rest > residue)
    return before, right + (right_rest > residue) - first, first


@device
def epoch_of(leaf: Leaf, ordinal: int) -> int:
    """The epoch in which a sample begins."""
    return (int(leaf.first_token) + int(ordinal) * int(leaf.sample_tokens)) // int(
        leaf.epoch_tokens
    )


@device
def epoch_start(leaf: Leaf, epoch: int) -> int:
    """The first ordinal whose sample begins in an epoch, or later; below 0 for epochs that began
    before the stage."""
    before = int(epoch) * int(leaf.epoch_tokens) - int(leaf.first_token)
    return (before + int(leaf.sample_tokens) - 1) // int(leaf.sample_tokens)


@device
def epoch_bounds(leaf: Leaf, epoch: int) -> tuple[int, int]:
    """The ordinals [first, stop) whose samples begin in an epoch; `first` is below 0 where it began
    before the stage."""
    if leaf.epoch_tokens == 0:
        return 0, ALL
    return epoch_start(leaf, epoch), epoch_start(leaf, epoch + 1)
