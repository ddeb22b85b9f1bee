"""The periods of a source: the cycles over which its ordinals are dealt to the lanes in runs of
neighbours.

A period belongs to one epoch of the source. It ends after `span` cycles, with the epoch, or with
the stage's last full cycle, whichever comes first. Periods are counted from the cycle in which the
epoch begins, or from the stage's start; a short cycle at the stage's end is a period of its own.

A source's samples in four cycles, as they are dealt, each with its epoch;
epoch 1 has a period of cycles 3 to 5:

    cycle       3                 4                 5                 6
            [0 0 0 1 1 1 1]   [1 1 1 1 1 1 1]   [1 1 1 1 2 2]     [2 2 2 2 2 2 2]
                   ^                                     ^
              FIRST_DEALT = 3                      DEALT_STOP = 4

    BEGIN = 3, END = 6: the period's cycles. UNMIXED_BEGIN = 4, UNMIXED_END = 5: its cycles without
    samples of other epochs. FIRST_ORDINAL: the first of its 15 ordinals.

In a cycle, a source has neighbouring positions, from `left` to `right`. Position x is turn x // K
of residue x % K, and each residue belongs to one lane. With K = 4 lanes and positions 6 to 14:

                 residue 0   1   2   3
        turn 1           .   .   6   7       LEFT_TURN = 1,  LEFT_RESIDUE = 2
        turn 2           8   9  10  11
        turn 3          12  13  14   .       RIGHT_TURN = 3, RIGHT_RESIDUE = 3

Positions are dealt by residue, so by lane, and then by turn: 8, 12 | 9, 13 | 6, 10, 14 | 7, 11 are
dealt as 0 to 8. In a cycle in which an epoch ends, the ordinals that are dealt first belong to the
old epoch, the others to the new one. Thus epochs are mixed within one cycle at most; docs/resume.md
proves how far.

`epoch_tokens` is 0 for a source whose epochs are ignored: all of it is one epoch.
"""

from __future__ import annotations

from typing import NamedTuple

from megablend.arrays import Int32s, Int64s
from megablend.jit import device
from megablend.kernels.blend.bijection import permuted
from megablend.kernels.blend.keyed_hash import hash_combine
from megablend.kernels.blend.tree import leaf_counts, least_multiple

# Fields of a row that describes a period
BEGIN = 0
"""The period's first cycle."""
END = 1
"""The cycle after the period's last one."""
EPOCH = 2
"""The epoch of the period's ordinals."""
UNMIXED_BEGIN = 3
"""The period's first cycle in which no earlier epoch ends."""
UNMIXED_END = 4
"""The cycle after the period's last one in which no later epoch begins."""
FIRST_ORDINAL = 5
"""The period's first ordinal."""
FIRST_DEALT = 6
"""Number of ordinals of earlier epochs that are dealt in cycle BEGIN."""
DEALT_STOP = 7
"""Number of ordinals that are dealt in cycle END - 1 up to the end of the period's epoch."""
PERIOD_FIELDS = 8

# Fields of a row that describes one cycle of a period: the source's positions [left, right) there
LEFT_TURN = 0
LEFT_RESIDUE = 1
RIGHT_TURN = 2
RIGHT_RESIDUE = 3
PART_FIELDS = 4

ALL = 1 << 62
"""A number larger than any ordinal: there is no end."""


class Stage(NamedTuple):
    """A stage: its tree, and how it is divided into cycles."""

    left_leaves: Int32s
    left_samples: Int64s
    total: int
    """Number of samples of the stage."""
    dealt: int
    """Number of samples in the stage's cycles, including the short cycle. The other samples are the
    stage's tail."""
    lanes: int
    step: int
    """Number of samples of a full cycle."""


class Leaf(NamedTuple):
    """A source in a stage."""

    rank: int
    """The leaf's number in the tree; see megablend.kernels.blend.tree."""
    total: int
    """Number of samples of the source in the stage."""
    first_token: int
    """First token of the source's first sample of the stage, counted over all its epochs."""
    span: int
    """Number of cycles of a full period."""
    epoch_tokens: int
    """Number of tokens of an epoch; 0 if epochs are ignored."""
    sample_tokens: int
    """Number of tokens from the start of one sample to the start of the next."""


@device
def make_leaf(
    rank: int,
    leaf_samples: Int64s,
    leaf_tokens: Int64s,
    leaf_spans: Int64s,
    leaf_epochs: Int64s,
    sample_tokens: int,
) -> Leaf:
    """Make the Leaf with this rank from arrays of all leaves, int64 [num_leaves]."""
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
    """Make a stage of `total` samples whose lanes have `slots` samples each in a full cycle."""
    total = int(total)
    lanes = int(lanes)
    return Stage(left_leaves, left_samples, total, total - total % lanes, lanes, lanes * int(slots))


@device
def find_period(stage: Stage, leaf: Leaf, cycle: int, epoch_first: int) -> tuple[int, int]:
    """Return the cycles [begin, end) of the period that contains a leaf's samples of an epoch in
    cycle `cycle`. The last of these cycles may have no samples of the epoch.

    Args:
        epoch_first: the first ordinal of the epoch.
    """
    full = int(stage.total) // int(stage.step)  # number of full cycles
    if cycle >= full:
        return cycle, cycle + 1
    # The cycle from which periods are counted: the cycle of the epoch's first sample
    origin = 0
    num_before = int(epoch_first)
    if num_before > 0 and leaf.span > 1:
        stop = least_multiple(
            stage.left_leaves,
            stage.left_samples,
            stage.total,
            leaf.total,
            leaf.rank,
            num_before + 1,
            stage.step,
        )
        origin = stop - 1
    begin = cycle - (cycle - origin) % leaf.span
    return begin, min(begin + leaf.span, full)


@device
def enter_period(
    stage: Stage,
    leaf: Leaf,
    cycle: int,
    epoch: int,
    epoch_first: int,
    epoch_stop: int,
    periods: Int64s,
    parts: Int64s,
) -> int:
    """Make a period available: the one that contains the ordinals of an epoch, [epoch_first,
    epoch_stop), in a cycle.

    Two periods of each leaf are kept, since two epochs may alternate within a cycle. If this period
    is not kept yet, row `rank` of periods, int64 [2, num_leaves, PERIOD_FIELDS], and of parts,
    int64 [2, num_leaves, span, PART_FIELDS], is filled; see `fill_period`.

    Returns: the number of the period among the two, which is the parity of its epoch.
    """
    parity = epoch % 2
    rank = leaf.rank
    if (
        periods[parity, rank, EPOCH] != epoch
        or not periods[parity, rank, BEGIN] <= cycle < periods[parity, rank, END]
    ):
        begin, end = find_period(stage, leaf, cycle, epoch_first)
        periods[parity, rank, EPOCH] = epoch
        fill_period(stage, leaf, begin, end, epoch_first, epoch_stop, parity, periods, parts)
    return parity


@device
def fill_period(
    stage: Stage,
    leaf: Leaf,
    begin: int,
    end: int,
    epoch_first: int,
    epoch_stop: int,
    parity: int,
    periods: Int64s,
    parts: Int64s,
) -> None:
    """Fill the rows of `periods` and `parts` for the period of cycles [begin, end) of an epoch with
    ordinals [epoch_first, epoch_stop). The period ends earlier if the epoch does.

    For each cycle, `parts` gets the leaf's positions [left, right), each as turn and residue.
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
    periods[parity, rank, FIRST_ORDINAL] = seen + low
    while cycle < end and seen < epoch_stop:
        stop = min((cycle + 1) * stage.step, stage.dealt)
        before_stop, seen_stop = leaf_counts(left_leaves, left_samples, total, stop, rank)
        left = before_stop - before
        right = left + seen_stop - seen
        high = min(right - left, epoch_stop - seen)
        part = parts[parity, rank, cycle - begin]
        part[LEFT_TURN] = left // lanes
        part[LEFT_RESIDUE] = left % lanes
        part[RIGHT_TURN] = right // lanes
        part[RIGHT_RESIDUE] = right % lanes
        before = before_stop
        seen = seen_stop
        cycle = cycle + 1
    periods[parity, rank, BEGIN] = begin
    periods[parity, rank, END] = cycle
    periods[parity, rank, FIRST_DEALT] = low
    periods[parity, rank, DEALT_STOP] = high
    periods[parity, rank, UNMIXED_BEGIN] = begin + (low > 0)
    periods[parity, rank, UNMIXED_END] = cycle - (seen > epoch_stop)


@device
def ordinal_in_period(
    lanes: int,
    rank: int,
    cycle: int,
    position: int,
    key: int,
    parity: int,
    periods: Int64s,
    parts: Int64s,
) -> int:
    """Return the ordinal of a leaf's position in a cycle of a period that `enter_period` has made
    available.

    In the period's first and last cycles, only the ordinals of its epoch count.

    Args:
        key: key of the cycle, the source and the lane, which orders the lane's part of the cycle.
    """
    turn = position // lanes
    residue = position % lanes
    begin = int(periods[parity, rank, BEGIN])
    end = int(periods[parity, rank, END])
    mixed = periods[parity, rank, UNMIXED_BEGIN] > begin or periods[parity, rank, UNMIXED_END] < end
    ordinal = int(periods[parity, rank, FIRST_ORDINAL])
    # First come the ordinals that lanes of smaller residues have in the whole period, then those
    # that this lane has in earlier cycles, then its part of this cycle, in a keyed order
    for period_cycle in range(begin, end):
        left_turn, left_residue, right_turn, right_residue = parts[
            parity, rank, period_cycle - begin
        ]
        before, own, first = count_dealt(
            left_turn, left_residue, right_turn, right_residue, residue
        )
        place = before + turn - first
        after = before + own
        if mixed:
            count = (right_turn - left_turn) * lanes + right_residue - left_residue
            lowest = int(periods[parity, rank, FIRST_DEALT]) if period_cycle == begin else 0
            highest = int(periods[parity, rank, DEALT_STOP]) if period_cycle == end - 1 else count
            before = min(max(before, lowest), highest)
            after = min(max(after, lowest), highest)
            ordinal -= lowest
            if period_cycle == cycle and highest - lowest < count:
                key = hash_combine(key, periods[parity, rank, EPOCH])
        ordinal += before
        if period_cycle < cycle:
            ordinal += after - before
        elif period_cycle == cycle:
            ordinal += permuted(place - before, after - before, key)
    return ordinal


@device
def count_dealt(
    left_turn: int, left_residue: int, right_turn: int, right_residue: int, residue: int
) -> tuple[int, int, int]:
    """Count a source's positions [left, right) in a cycle.

    Returns: how many have smaller residues, how many have `residue`, and the first turn of the
    latter. For residue 2 of the example in the module's docstring: 4, 3, 1.
    """
    before = (
        (right_turn - left_turn) * residue
        + min(right_residue, residue)
        - min(left_residue, residue)
    )
    first = left_turn + (left_residue > residue)
    return before, right_turn + (right_residue > residue) - first, first


@device
def epoch_of(leaf: Leaf, ordinal: int) -> int:
    """Return the epoch in which the sample with this ordinal begins."""
    return (int(leaf.first_token) + int(ordinal) * int(leaf.sample_tokens)) // int(
        leaf.epoch_tokens
    )


@device
def epoch_start(leaf: Leaf, epoch: int) -> int:
    """Return the ordinal of the first sample that begins in an epoch or later. It is negative if
    the epoch began before the stage."""
    before = int(epoch) * int(leaf.epoch_tokens) - int(leaf.first_token)
    return (before + int(leaf.sample_tokens) - 1) // int(leaf.sample_tokens)


@device
def epoch_bounds(leaf: Leaf, epoch: int) -> tuple[int, int]:
    """Return the ordinals [first, stop) of the samples that begin in an epoch. `first` is negative
    if the epoch began before the stage."""
    if leaf.epoch_tokens == 0:
        return 0, ALL
    return epoch_start(leaf, epoch), epoch_start(leaf, epoch + 1)
