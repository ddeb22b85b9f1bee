"""Sample number -> (source, ordinal), in closed form: cycles and lanes over the tree's counts.

Within a stage sample j is slot j // K of its cycle and lane j % K. A cycle of b slots lays its b * K samples out by source, in
the tree's leaf order; lane l owns the positions x of one residue x % K, so that it gets floor or ceil of its part of every
source, and at slot p takes x = (firsts[l] + K * ((stride * p + shift) % b)) % (b * K), `shift` being keyed by the cycle.
megablend.plan.weave says how firsts and stride are chosen. What a stage has beyond a multiple of K follows the tree's own order.

A source's ordinals in a *period* (megablend.kernels.plan.periods: up to spans[source] cycles) are dealt to the lanes in runs of
neighbours, by residue. A lane walks its run front to back, each cycle's part of it in a keyed order, where an epoch ends each
epoch's part.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import device, kernel
from megablend.kernels.plan.bijection import permuted
from megablend.kernels.plan.keyed_hash import bounded_hash, hash_combine
from megablend.kernels.plan.periods import (
    BEGIN,
    END,
    EPOCH,
    HEAD,
    HIGH,
    LOW,
    ORDINAL,
    PURE_BEGIN,
    PURE_END,
    count_ranks,
    enter_period,
)
from megablend.kernels.plan.tree import leaf_at, leaf_counts

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@kernel
def locate(
    ks: Int64s,
    starts: Int64s,
    leaf_offsets: Int64s,
    left_leaves: Int32s,
    left_samples: Int64s,
    leaf_sources: Int32s,
    leaf_ordinals: Int64s,
    leaf_samples: Int64s,
    weaves: Int64s,
    firsts: Int64s,
    strides: Int64s,
    spans: Int64s,
    epoch_tokens: Int64s,
    sample_tokens: int,
    slots: int,
    seed: int,
    sources: Int32s,
    ordinals: Int64s,
) -> None:
    """Fill sources int32 [n] and ordinals int64 [n] of the samples ks int64 [n], each in [0, starts[-1]).

    Of stages: starts [num_stages + 1], first samples; leaf_offsets [num_stages + 1]; weaves [num_stages], the cut cycle's row.
    Of leaves, stage after stage: the trees (megablend.kernels.plan.tree); leaf_sources; leaf_ordinals, the stage's first;
    leaf_samples, the stage's totals.
    Of weaves, row 0 that of full cycles: firsts [num_weaves, K]; strides [num_weaves].
    Of sources: spans; epoch_tokens, of an epoch of each, or 0 (megablend.kernels.plan.periods).
    """
    lanes = firsts.shape[1]
    cycle_samples = lanes * slots
    # Of each leaf, two periods and which of them was met last.
    latest = np.zeros(len(leaf_sources), np.int64)
    heads = np.zeros((2, len(leaf_sources), HEAD), np.int64)
    parts = np.empty((2, len(leaf_sources), max(spans), 4), np.int64)
    for i in range(len(ks)):
        stage = interval(starts, int(ks[i]))
        start, leaf = int(starts[stage]), int(leaf_offsets[stage])
        size, total = int(leaf_offsets[stage + 1]) - leaf, int(starts[stage + 1]) - start
        j = int(ks[i]) - start
        dealt = total - total % lanes
        if j >= dealt:
            rank = leaf_at(left_leaves, left_samples, leaf, size, total, j, j + 1, 0)
            _, ordinal = leaf_counts(left_leaves, left_samples, leaf, size, total, j, rank)
            sources[i], ordinals[i] = leaf_sources[leaf + rank], leaf_ordinals[leaf + rank] + ordinal
            continue

        cycle = j // cycle_samples
        low, high = cycle * cycle_samples, min((cycle + 1) * cycle_samples, dealt)
        full = high - low == cycle_samples
        weave = 0 if full else int(weaves[stage])
        key = cycle_key(seed, start, cycle)
        slot, lane = (j - low) // lanes, (j - low) % lanes
        turns = (high - low) // lanes
        turn = (int(strides[weave]) * slot + bounded_hash(key, 0, turns)) % turns
        position = (int(firsts[weave, lane]) + lanes * turn) % (high - low)
        rank = leaf_at(left_leaves, left_samples, leaf, size, total, low, high, position)
        source = int(leaf_sources[leaf + rank])

        at = leaf + rank
        which = int(latest[at])
        if not heads[which, at, PURE_BEGIN] <= cycle < heads[which, at, PURE_END]:
            which = latest[at] = enter_period(
                left_leaves,
                left_samples,
                leaf,
                size,
                total,
                rank,
                int(leaf_samples[at]),
                int(leaf_ordinals[at]),
                lanes,
                slots,
                cycle,
                position,
                int(spans[source]),
                int(epoch_tokens[source]),
                sample_tokens,
                heads,
                parts,
                at,
            )

        begin, end = int(heads[which, at, BEGIN]), int(heads[which, at, END])
        turn, residue = position // lanes, position % lanes
        chosen = hash_combine(hash_combine(key, source), lane)
        ordinal = int(heads[which, at, ORDINAL])
        if heads[which, at, PURE_BEGIN] == begin and heads[which, at, PURE_END] == end:
            for other in range(end - begin):
                left, left_rest, right, right_rest = parts[which, at, other]
                # those of earlier lanes
                ordinal += (right - left) * residue + min(right_rest, residue) - min(left_rest, residue)
                first = left + (left_rest > residue)  # of the positions of this residue, [first, first + mine)
                mine = right + (right_rest > residue) - first
                if begin + other < cycle:
                    ordinal += mine
                elif begin + other == cycle:
                    ordinal += permuted(turn - first, mine, chosen)
        else:  # the same, with ranks cut to those of the period's epoch
            for other in range(end - begin):
                left, left_rest, right, right_rest = parts[which, at, other]
                count = (right - left) * lanes + right_rest - left_rest
                lowest = int(heads[which, at, LOW]) if other == 0 else 0
                highest = int(heads[which, at, HIGH]) if begin + other == end - 1 else count
                before, mine, first = count_ranks(left, left_rest, right, right_rest, residue)
                after = min(max(before + mine, lowest), highest)
                place, before = before + turn - first, min(max(before, lowest), highest)
                ordinal += before - lowest
                if begin + other < cycle:
                    ordinal += after - before
                elif begin + other == cycle:
                    if highest - lowest < count:
                        chosen = hash_combine(chosen, heads[which, at, EPOCH])
                    ordinal += permuted(place - before, after - before, chosen)
        sources[i], ordinals[i] = source, ordinal


@kernel
def cycle_shift(seed: int, start: int, cycle: int, turns: int) -> int:
    """By how many turns the lanes of a cycle of `turns` slots are ahead; `start` is the stage's first sample."""
    return bounded_hash(cycle_key(seed, start, cycle), 0, turns)


@device
def cycle_key(seed: int, start: int, cycle: int) -> int:
    """The key of a cycle; `start` is its stage's first sample."""
    return hash_combine(hash_combine(seed, start), cycle)


@device
def interval(edges: Int64s, value: int) -> int:
    """The i with edges[i] <= value < edges[i + 1]; edges ascend strictly."""
    low, high = 0, len(edges) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if value < edges[middle]:
            high = middle
        else:
            low = middle
    return low
