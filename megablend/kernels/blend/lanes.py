"""Locate samples of a stage: sample number -> (source, ordinal), in closed form, by cycles and
lanes over the tree's counts.

Sample j is slot j // K of its cycle and lane j % K. A cycle of b slots lays its b * K samples out
by source, in the tree's leaf order; lane l owns the positions x of one residue x % K, so that it
gets floor or ceil of its part of every source, and at slot p takes x = (firsts[l] + K * ((stride *
p + shift) % b)) % (b * K), `shift` being keyed by the cycle.
megablend.blend.interleavings.lane_schedule says how firsts and stride are chosen. The samples of a
stage beyond a multiple of K follow the tree's own order.

A source's ordinals in a *period* (megablend.kernels.blend.periods: up to leaf_spans[rank] cycles)
are dealt to the lanes in runs of neighbours, by residue. A lane walks its run from front to back
and takes each cycle's part of it in a keyed order; in a cycle in which an epoch ends, it takes each
epoch's part in such an order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megablend.arrays import Int32s, Int64s
from megablend.jit import device, kernel
from megablend.kernels.blend.cycle_epochs import (
    COUNTS,
    CYCLE,
    find_epoch,
    is_within_cycle,
    ordinal_in_cycle,
)
from megablend.kernels.blend.keyed_hash import bounded_hash, hash_combine
from megablend.kernels.blend.periods import (
    PART_FIELDS,
    PERIOD_FIELDS,
    UNMIXED_BEGIN,
    UNMIXED_END,
    Stage,
    enter_period,
    epoch_bounds,
    make_leaf,
    make_stage,
    ordinal_in_period,
)
from megablend.kernels.blend.tree import leaf_at, leaf_counts


class Cycle(NamedTuple):
    """A cycle of a stage: the values that all samples of the cycle have in common."""

    number: int
    low: int
    high: int
    """The cycle's samples are [low, high)."""
    turns: int
    """Number of slots, and of turns of each residue."""
    schedule: int
    """Number of the cycle's schedule: 0 for a full cycle, otherwise that of the short cycle."""
    shift: int
    """Number of turns by which the slots are rotated."""
    key: int


@kernel
def locate(
    ks: Int64s,
    left_leaves: Int32s,
    left_samples: Int64s,
    leaf_sources: Int32s,
    leaf_samples: Int64s,
    leaf_tokens: Int64s,
    leaf_spans: Int64s,
    leaf_epochs: Int64s,
    sample_tokens: int,
    firsts: Int64s,
    strides: Int64s,
    slots: int,
    seed: int,
    start: int,
    sources: Int32s,
    ordinals: Int64s,
) -> None:
    """Compute the source and the ordinal of each sample. Samples and ordinals are counted from the
    stage's start.

    Args:
        ks: int64 [n], the numbers of the samples.
        left_leaves, left_samples: the tree; see megablend.kernels.blend.tree.
        leaf_sources: int32 [num_leaves], the source of each leaf, in order of rank.
        leaf_samples, leaf_tokens, leaf_spans, leaf_epochs: int64 [num_leaves], `total`,
            `first_token`, `span` and `epoch_tokens` of each leaf; see `Leaf`.
        firsts: int64 [1 or 2, K], of the schedules of a full cycle and, if there is one, of the
            short cycle; see megablend.blend.interleavings.lane_schedule.
        strides: int64 [1 or 2], of these schedules.
        slots: number of slots of a full cycle.
        start: number of the stage's first sample in the run.
        sources: int32 [n], filled.
        ordinals: int64 [n], filled.
    """
    lanes = firsts.shape[1]
    total = int(leaf_samples.sum())
    stage = make_stage(left_leaves, left_samples, total, lanes, slots)
    # For each leaf: two periods, and the number of the one used last; -1 for a leaf that no sample
    # has had so far, as most leaves in a short call
    latest = np.full(len(leaf_sources), -1, np.int64)
    periods = np.empty((2, len(leaf_sources), PERIOD_FIELDS), np.int64)
    parts = np.empty((2, len(leaf_sources), max(leaf_spans), PART_FIELDS), np.int64)
    counts = np.empty((len(leaf_sources), COUNTS), np.int64)
    num_schedules = len(strides)
    cycle = Cycle(-1, 0, 0, 0, 0, 0, 0)  # none yet
    for i in range(len(ks)):
        k = int(ks[i])
        if k >= stage.dealt:  # in the tail, which follows the tree's own order
            rank = leaf_at(left_leaves, left_samples, total, k, k + 1, 0)
            _, ordinal = leaf_counts(left_leaves, left_samples, total, k, rank)
            sources[i] = leaf_sources[rank]
            ordinals[i] = ordinal
            continue
        if k // stage.step != cycle.number:
            cycle = make_cycle(stage, k // stage.step, num_schedules, seed, start)
        lane = (k - cycle.low) % lanes
        position = position_of(
            cycle,
            int(firsts[cycle.schedule, lane]),
            int(strides[cycle.schedule]),
            (k - cycle.low) // lanes,
            lanes,
        )
        rank = leaf_at(left_leaves, left_samples, total, cycle.low, cycle.high, position)
        sources[i] = leaf_sources[rank]
        key = hash_combine(hash_combine(cycle.key, leaf_sources[rank]), lane)
        if latest[rank] < 0:
            latest[rank] = 0
            counts[rank, CYCLE] = -1
            periods[:, rank] = 0
        parity = int(latest[rank])
        number = cycle.number
        if not periods[parity, rank, UNMIXED_BEGIN] <= number < periods[parity, rank, UNMIXED_END]:
            leaf = make_leaf(
                rank, leaf_samples, leaf_tokens, leaf_spans, leaf_epochs, sample_tokens
            )
            epoch = find_epoch(stage, leaf, number, position, counts)
            first, stop = epoch_bounds(leaf, epoch)
            if is_within_cycle(lanes, number, first, stop, counts[rank]):
                ordinals[i] = ordinal_in_cycle(
                    lanes, position, key, epoch, first, stop, counts[rank]
                )
                continue
            parity = latest[rank] = enter_period(
                stage, leaf, number, epoch, first, stop, periods, parts
            )
        ordinals[i] = ordinal_in_period(lanes, rank, number, position, key, parity, periods, parts)


@kernel
def cycle_shift(seed: int, start: int, cycle: int, turns: int) -> int:
    """Return the number of turns by which a cycle of `turns` slots is rotated; `start`: see
    `locate`."""
    return bounded_hash(cycle_key(seed, start, cycle), 0, turns)


@device
def cycle_key(seed: int, start: int, cycle: int) -> int:
    """Return the key of a cycle; `start`: see `locate`."""
    return hash_combine(hash_combine(seed, start), cycle)


@device
def make_cycle(stage: Stage, number: int, num_schedules: int, seed: int, start: int) -> Cycle:
    """Make a cycle of a stage that has 1 or 2 schedules; `start`: see `locate`."""
    low, high = cycle_edges(stage, number)
    turns = (high - low) // stage.lanes
    schedule = 0 if high - low == stage.step else num_schedules - 1
    key = cycle_key(seed, start, number)
    return Cycle(number, low, high, turns, schedule, bounded_hash(key, 0, turns), key)


@device
def position_of(cycle: Cycle, first: int, stride: int, slot: int, lanes: int) -> int:
    """Return the position that a lane takes at a slot of a cycle, given the lane's first position
    and the stride of the cycle's schedule."""
    turn = (stride * slot + cycle.shift) % cycle.turns
    return (first + lanes * turn) % (cycle.high - cycle.low)


@device
def cycle_edges(stage: Stage, cycle: int) -> tuple[int, int]:
    """Return the range [low, high) of a cycle's samples."""
    return cycle * stage.step, min((cycle + 1) * stage.step, stage.dealt)
