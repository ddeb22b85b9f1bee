"""The epochs of a source in a cycle: the epoch that a position belongs to, and the ordinals of
epochs that begin and end in the cycle.

An epoch within a single cycle is a period by itself (megablend.kernels.blend.periods), and needs
only the counts at the cycle's edges. For each leaf, the counts of the most recently used cycle are
kept, since a cycle may have many short epochs.
"""

from __future__ import annotations

from megablend.arrays import Int64s
from megablend.jit import device
from megablend.kernels.blend.bijection import permuted
from megablend.kernels.blend.keyed_hash import hash_combine
from megablend.kernels.blend.periods import (
    LEFT_RESIDUE,
    LEFT_TURN,
    PART_FIELDS,
    RIGHT_RESIDUE,
    RIGHT_TURN,
    Leaf,
    Stage,
    count_dealt,
    epoch_of,
)
from megablend.kernels.blend.tree import leaf_counts

# Fields of a row that describes one cycle of a leaf; they follow PART_FIELDS fields, the leaf's
# positions in the cycle
CYCLE = PART_FIELDS
"""The number of the cycle; -1 if the row describes none."""
SEEN = PART_FIELDS + 1
"""Number of the leaf's samples before the cycle."""
COUNTS = PART_FIELDS + 2
"""Number of fields of a row."""


@device
def find_epoch(stage: Stage, leaf: Leaf, cycle: int, position: int, counts: Int64s) -> int:
    """Return the epoch of a leaf's sample at a position of a cycle.

    If an estimate shows that the cycle has a single epoch, no samples are counted.

    Args:
        counts: int64 [num_leaves, COUNTS]; if samples are counted, the leaf's row is updated.
    """
    if leaf.epoch_tokens == 0:
        return 0
    if counts[leaf.rank, CYCLE] != cycle:
        stop = min((cycle + 1) * stage.step, stage.dealt)
        # Counts are within 2 of the share, and within 3 with the rounding of doubles
        pace = float(leaf.total) / float(stage.total)
        epoch = epoch_of(leaf, max(0, int(float(cycle * stage.step) * pace) - 3))
        if epoch_of(leaf, int(float(stop) * pace) + 3) == epoch:
            return epoch
        _count_cycle(stage, leaf, cycle, stop, counts)
    left_turn, left_residue, right_turn, right_residue = counts[leaf.rank, :PART_FIELDS]
    before, _, first = count_dealt(
        left_turn, left_residue, right_turn, right_residue, position % stage.lanes
    )
    return epoch_of(leaf, counts[leaf.rank, SEEN] + before + position // stage.lanes - first)


@device
def _count_cycle(stage: Stage, leaf: Leaf, cycle: int, stop: int, counts: Int64s) -> None:
    """Fill the leaf's row of `counts` for a cycle, whose samples end before sample `stop`."""
    left_leaves = stage.left_leaves
    left_samples = stage.left_samples
    total = stage.total
    lanes = stage.lanes
    before, seen = leaf_counts(left_leaves, left_samples, total, cycle * stage.step, leaf.rank)
    before_stop, seen_stop = leaf_counts(left_leaves, left_samples, total, stop, leaf.rank)
    left = before_stop - before
    right = left + seen_stop - seen
    row = counts[leaf.rank]
    row[CYCLE] = cycle
    row[SEEN] = seen
    row[LEFT_TURN] = left // lanes
    row[LEFT_RESIDUE] = left % lanes
    row[RIGHT_TURN] = right // lanes
    row[RIGHT_RESIDUE] = right % lanes


@device
def is_within_cycle(lanes: int, cycle: int, epoch_first: int, epoch_stop: int, row: Int64s) -> bool:
    """Return whether all ordinals [epoch_first, epoch_stop) of an epoch are in a cycle; False if
    `row`, the leaf's row of `counts`, does not describe the cycle."""
    return bool(
        row[CYCLE] == cycle
        and row[SEEN] <= epoch_first
        and epoch_stop <= row[SEEN] + _num_samples(lanes, row)
    )


@device
def ordinal_in_cycle(
    lanes: int, position: int, key: int, epoch: int, epoch_first: int, epoch_stop: int, row: Int64s
) -> int:
    """Return the ordinal of a leaf's position in a cycle. The position belongs to an epoch with the
    ordinals [epoch_first, epoch_stop), all of which are in the cycle.

    Args:
        key: key of the cycle, the source and the lane.
        row: the leaf's row of `counts`.
    """
    seen = int(row[SEEN])
    before, own, first = count_dealt(
        row[LEFT_TURN], row[LEFT_RESIDUE], row[RIGHT_TURN], row[RIGHT_RESIDUE], position % lanes
    )
    place = before + position // lanes - first
    low = max(before, epoch_first - seen)
    high = min(before + own, epoch_stop - seen)
    if epoch_stop - epoch_first < _num_samples(lanes, row):
        key = hash_combine(key, epoch)
    return seen + low + permuted(place - low, high - low, key)


@device
def _num_samples(lanes: int, row: Int64s) -> int:
    """Return how many samples a leaf has in the cycle."""
    return int((row[RIGHT_TURN] - row[LEFT_TURN]) * lanes + row[RIGHT_RESIDUE] - row[LEFT_RESIDUE])
