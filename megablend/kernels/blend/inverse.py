"""Find the samples of a stage: (source, ordinal) -> sample number, in closed form; the inverse of
megablend.kernels.blend.lanes.locate.

Counts at the edges of cycles give an ordinal's period. In a period, ordinals are dealt to lanes by
residue, so that a bisection over residues finds the lane, a walk over the period's cycles finds the
cycle, and the inverse of the keyed permutation finds the turn; the pattern of the cycle then gives
the slot.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Int32s, Int64s
from megablend.jit import device, kernel
from megablend.kernels.blend.bijection import unpermuted
from megablend.kernels.blend.dealing import dealt_below, epoch_edges, residue_of
from megablend.kernels.blend.keyed_hash import bounded_hash, hash_combine
from megablend.kernels.blend.lanes import cycle_edges, cycle_key
from megablend.kernels.blend.periods import (
    BEGIN,
    END,
    EPOCH,
    FIRST_ORDINAL,
    PART_FIELDS,
    PERIOD_FIELDS,
    Leaf,
    Stage,
    count_dealt,
    epoch_bounds,
    epoch_of,
    fill_period,
    find_period,
    make_leaf,
    make_stage,
)
from megablend.kernels.blend.tree import leaf_counts, least_multiple


@kernel
def find_samples(
    ranks: Int64s,
    ordinals: Int64s,
    left_leaves: Int32s,
    left_samples: Int64s,
    leaf_sources: Int32s,
    leaf_samples: Int64s,
    leaf_tokens: Int64s,
    leaf_spans: Int64s,
    leaf_epochs: Int64s,
    sample_tokens: int,
    firsts: Int64s,
    owners: Int64s,
    inverse_strides: Int64s,
    slots: int,
    seed: int,
    start: int,
    ks: Int64s,
) -> None:
    """Find the numbers of samples, given their leaves and ordinals. Ordinals and samples are
    counted from the stage's start. This is fastest if neighbours have the same leaf and ascending
    ordinals.

    Args:
        ranks: int64 [n], the leaf of each sample.
        ordinals: int64 [n], the ordinal of each sample, less than the leaf's number of samples.
        owners: int64 [1 or 2, K], the lane that has each residue in a full cycle and, if there is
            one, in the short cycle.
        inverse_strides: int64 [1 or 2], inverses of the strides modulo the slots of these cycles.
        ks: int64 [n], filled with the numbers of the samples.
        Others: see megablend.kernels.blend.lanes.locate.
    """
    lanes = firsts.shape[1]
    total = int(leaf_samples.sum())
    stage = make_stage(left_leaves, left_samples, total, lanes, slots)
    # The leaf whose period was filled last, and the end of the period's ordinals
    filled_rank = -1
    filled_stop = 0
    periods = np.zeros((1, len(leaf_samples), PERIOD_FIELDS), np.int64)
    parts = np.empty((1, len(leaf_samples), max(leaf_spans), PART_FIELDS), np.int64)
    for i in range(len(ks)):
        rank = int(ranks[i])
        ordinal = int(ordinals[i])
        count = ordinal + 1
        leaf = make_leaf(rank, leaf_samples, leaf_tokens, leaf_spans, leaf_epochs, sample_tokens)
        if filled_rank != rank or not periods[0, rank, FIRST_ORDINAL] <= ordinal < filled_stop:
            # The first cycle by whose end the leaf has `count` samples
            stop_cycle = least_multiple(
                left_leaves, left_samples, total, leaf.total, rank, count, stage.step
            )
            if _is_in_tail(stage, rank, count, stop_cycle):  # which follows the tree's own order
                stop = least_multiple(left_leaves, left_samples, total, leaf.total, rank, count, 1)
                ks[i] = stop - 1
                continue
            fill_period_of(stage, leaf, stop_cycle - 1, ordinal, periods, parts)
            cycles = int(periods[0, rank, END] - periods[0, rank, BEGIN])
            filled_rank = rank
            filled_stop = int(periods[0, rank, FIRST_ORDINAL]) + dealt_below(
                periods[0, rank], parts[0, rank], lanes, lanes, 0, cycles
            )
        period = periods[0, rank]
        part = parts[0, rank]
        place = ordinal - int(period[FIRST_ORDINAL])
        residue = residue_of(period, part, lanes, place, 0, cycles)
        place -= dealt_below(period, part, lanes, residue, 0, cycles)
        for local_cycle in range(cycles):
            low, high, turn = _lane_dealt(period, part, lanes, local_cycle, residue)
            if place < high - low:
                break
            place -= high - low
        cycle = int(period[BEGIN]) + local_cycle
        key = cycle_key(seed, start, cycle)
        cycle_low, cycle_high = cycle_edges(stage, cycle)
        turns = (cycle_high - cycle_low) // lanes
        schedule = 0 if turns == slots else len(inverse_strides) - 1
        lane = int(owners[schedule, residue])
        lane_key = hash_combine(hash_combine(key, leaf_sources[rank]), lane)
        if _is_mixed(period, part, lanes, local_cycle):
            lane_key = hash_combine(lane_key, period[EPOCH])
        turn += unpermuted(place, high - low, lane_key)
        first = int(firsts[schedule, lane])
        slot = _find_slot(
            turn * lanes + residue, first, lanes, turns, key, inverse_strides[schedule]
        )
        ks[i] = cycle_low + slot * lanes + lane


@device
def _is_in_tail(stage: Stage, rank: int, count: int, stop_cycle: int) -> bool:
    """Return whether sample number `count` of a leaf, counted from 1, is in the tail, after all
    cycles. `stop_cycle` is the smallest number of cycles in which the leaf has `count` samples."""
    if stop_cycle * stage.step <= stage.dealt:
        return False
    _, seen = leaf_counts(stage.left_leaves, stage.left_samples, stage.total, stage.dealt, rank)
    return bool(seen < count)


@device
def _find_slot(
    position: int, first: int, lanes: int, turns: int, key: int, inverse_stride: int
) -> int:
    """Return the slot at which a lane takes `position` in a cycle: the inverse of
    `megablend.kernels.blend.lanes.position_of`.

    Args:
        first: the lane's first position, before slots are rotated.
        turns: number of the lane's slots in the cycle.
        key: the key of the cycle.
        inverse_stride: the inverse of the schedule's stride modulo `turns`.
    """
    ahead = (position - first) // lanes
    unshifted = (ahead - bounded_hash(key, 0, turns)) % turns
    return unshifted * int(inverse_stride) % turns


@device
def fill_period_of(
    stage: Stage, leaf: Leaf, cycle: int, ordinal: int, periods: Int64s, parts: Int64s
) -> None:
    """Fill the rows of `periods` and `parts` for the period that contains an ordinal. By the counts
    at the edges of cycles, the ordinal belongs to cycle `cycle`."""
    epoch = epoch_of(leaf, ordinal) if leaf.epoch_tokens > 0 else 0
    epoch_first, epoch_stop = epoch_bounds(leaf, epoch)
    begin, end = find_period(stage, leaf, cycle, epoch_first)
    periods[0, leaf.rank, EPOCH] = epoch
    fill_period(stage, leaf, begin, end, epoch_first, epoch_stop, 0, periods, parts)


@device
def _is_mixed(period: Int64s, parts: Int64s, lanes: int, local_cycle: int) -> bool:
    """Return whether ordinals of more than one epoch are dealt in cycle number `local_cycle` of the
    period."""
    lowest, highest = epoch_edges(period, local_cycle)
    left_turn, left_residue, right_turn, right_residue = parts[local_cycle]
    return bool(
        lowest > 0 or highest < (right_turn - left_turn) * lanes + right_residue - left_residue
    )


@device
def _lane_dealt(
    period: Int64s, parts: Int64s, lanes: int, local_cycle: int, residue: int
) -> tuple[int, int, int]:
    """Return the range [low, high) of the ordinals that go to a residue, among all ordinals that
    are dealt in cycle number `local_cycle` of the period; and the turn of `low`."""
    left_turn, left_residue, right_turn, right_residue = parts[local_cycle]
    before, mine, first = count_dealt(left_turn, left_residue, right_turn, right_residue, residue)
    lowest, highest = epoch_edges(period, local_cycle)
    low = min(max(before, lowest), highest)
    return low, min(max(before + mine, lowest), highest), first + low - before
