"""Locate samples of a stage: sample number -> (source, ordinal), in closed form, by cycles and
lanes over the tree's counts.

Sample j is slot j // K of its cycle and lane j % K. A cycle of b slots lays its b * K samples out
by source, in the tree's leaf order; lane l owns the positions x of one residue x % K, so that it
gets floor or ceil of its part of every source, and at slot p takes x = (firsts[l] + K * ((stride *
p + shift) % b)) % (b * K), `shift` being keyed by the cycle.
megablend.blend.interleavings.lane_schedule says how firsts and stride are chosen. What a stage has
beyond a multiple of K follows the tree's own order.

A source's ordinals in a *period* (megablend.kernels.blend.periods: up to leaf_spans[rank] cycles)
are dealt to the lanes in runs of neighbours, by residue. A lane walks its run front to back, each
cycle's part of it in a keyed order; in a cycle in which an epoch ends, each epoch's part.
"""

from __future__ import annotations

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
    """Fill the sources and ordinals of samples; samples and ordinals are counted from the stage's
    start.

    Args:
        ks: int64 [n], the samples.
        left_leaves, left_samples: the tree; see megablend.kernels.blend.tree.
        leaf_sources: int32 [num_leaves], by rank, as the next four; see `Leaf`.
        leaf_samples, leaf_tokens, leaf_spans, leaf_epochs: int64 [num_leaves], `total`,
            `first_token`, `span` and `epoch_tokens` of each leaf.
        firsts: int64 [1 or 2, K], of the schedules of a full cycle and, if there is one, of the
            short cycle; see megablend.blend.interleavings.lane_schedule.
        strides: int64 [1 or 2], of these schedules.
        slots: slots of a full cycle.
        start: number of the stage's first sample in the run.
        sources: int32 [n], is filled.
        ordinals: int64 [n], is filled.
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
    # The cycle of the last sample, and what follows from it
    last_cycle = -1
    low = 0
    high = 0
    turns = 1
    schedule = 0
    shift = 0
    key_of_cycle = cycle_key(seed, start, 0)
    for i in range(len(ks)):
        k = int(ks[i])
        if k >= stage.dealt:  # in the tail, which follows the tree's own order
            rank = leaf_at(left_leaves, left_samples, total, k, k + 1, 0)
            _, ordinal = leaf_counts(left_leaves, left_samples, total, k, rank)
            sources[i] = leaf_sources[rank]
            ordinals[i] = ordinal
            continue
        cycle = k // stage.step
        if cycle != last_cycle:
            last_cycle = cycle
            key_of_cycle = cycle_key(seed, start, cycle)
            low, high = cycle_edges(stage, cycle)
            turns = (high - low) // lanes
            schedule = 0 if high - low == stage.step else len(strides) - 1
            shift = bounded_hash(key_of_cycle, 0, turns)
        slot = (k - low) // lanes
        lane = (k - low) % lanes
        turn = (int(strides[schedule]) * slot + shift) % turns
        position = (int(firsts[schedule, lane]) + lanes * turn) % (high - low)
        rank = leaf_at(left_leaves, left_samples, total, low, high, position)
        if latest[rank] < 0:
            latest[rank] = 0
            counts[rank, CYCLE] = -1
            periods[:, rank] = 0
        parity = int(latest[rank])
        key = hash_combine(hash_combine(key_of_cycle, leaf_sources[rank]), lane)
        sources[i] = leaf_sources[rank]
        if not periods[parity, rank, UNMIXED_BEGIN] <= cycle < periods[parity, rank, UNMIXED_END]:
            leaf = make_leaf(
                rank, leaf_samples, leaf_tokens, leaf_spans, leaf_epochs, sample_tokens
            )
            epoch = find_epoch(stage, leaf, cycle, position, counts)
            first, stop = epoch_bounds(leaf, epoch)
            if is_within_cycle(lanes, cycle, first, stop, counts[rank]):
                ordinals[i] = ordinal_in_cycle(
                    lanes, position, key, epoch, first, stop, counts[rank]
                )
                continue
            parity = latest[rank] = enter_period(
                stage, leaf, cycle, epoch, first, stop, periods, parts
            )
        ordinals[i] = ordinal_in_period(lanes, rank, cycle, position, key, parity, periods, parts)


@kernel
def cycle_shift(seed: int, start: int, cycle: int, turns: int) -> int:
    """The number of turns by which a cycle of `turns` slots is rotated; `start`: see `locate`."""
    return bounded_hash(cycle_key(seed, start, cycle), 0, turns)


@device
def cycle_key(seed: int, start: int, cycle: int) -> int:
    """The key of a cycle; `start`: see `locate`."""
    return hash_combine(hash_combine(seed, start), cycle)


@device
def cycle_edges(stage: Stage, cycle: int) -> tuple[int, int]:
    """A cycle's samples [low, high)."""
    return cycle * stage.step, min((cycle + 1) * stage.step, stage.dealt)
