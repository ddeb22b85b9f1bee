"""(source, ordinal) -> sample number: the inverse of megablend.kernels.plan.lanes.locate, in closed form.

Counts at the edges of cycles give an ordinal's period. In a period ordinals are dealt to lanes by residue, so a bisection over
residues finds the lane, a walk over the period's cycles the cycle, and the inverse of the keyed permutation the turn; the
pattern of the cycle then says which slot takes it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import device, kernel
from megablend.kernels.plan.bijection import unpermuted
from megablend.kernels.plan.keyed_hash import bounded_hash, hash_combine
from megablend.kernels.plan.lanes import cycle_key, interval
from megablend.kernels.plan.periods import (
    ALL,
    BEGIN,
    END,
    EPOCH,
    HEAD,
    HIGH,
    LOW,
    ORDINAL,
    count_ranks,
    epoch_of,
    epoch_start,
    fill_period,
)
from megablend.kernels.plan.tree import leaf_counts, least_multiple

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@kernel
def find_samples(
    sources: Int32s,
    ordinals: Int64s,
    source_offsets: Int64s,
    source_leaves: Int64s,
    starts: Int64s,
    leaf_offsets: Int64s,
    left_leaves: Int32s,
    left_samples: Int64s,
    leaf_ordinals: Int64s,
    leaf_samples: Int64s,
    weaves: Int64s,
    firsts: Int64s,
    owners: Int64s,
    inverse_strides: Int64s,
    spans: Int64s,
    epoch_tokens: Int64s,
    sample_tokens: int,
    slots: int,
    seed: int,
    ks: Int64s,
) -> None:
    """Fill ks int64 [n] with the samples of (sources int32 [n], ordinals int64 [n]); -1 where there is none.

    Fastest where neighbours are of one source and ascend. Of sources: source_offsets [num_sources + 1] into source_leaves
    [leaves of all stages], their leaves, stage after stage. Of weaves: owners [num_weaves, K], which lane has each residue;
    inverse_strides [num_weaves], modulo their turns. Others as `locate` has them.
    """
    lanes = firsts.shape[1]
    step = lanes * slots
    kept, kept_stop = -1, 0  # the leaf of the period that is kept, and the end of its ordinals
    head, parts = np.zeros(HEAD, np.int64), np.empty((max(spans), 4), np.int64)
    for i in range(len(ks)):
        source, ordinal = int(sources[i]), int(ordinals[i])
        leaf = _leaf_of(source_leaves, source_offsets, leaf_ordinals, leaf_samples, source, ordinal)
        if leaf < 0:
            ks[i] = -1
            continue
        stage = interval(leaf_offsets, leaf)
        start, first = int(starts[stage]), int(leaf_offsets[stage])
        size, total = int(leaf_offsets[stage + 1]) - first, int(starts[stage + 1]) - start
        rank, leaf_total, leaf_ordinal = leaf - first, int(leaf_samples[leaf]), int(leaf_ordinals[leaf])
        dealt = total - total % lanes
        if kept != leaf or not head[ORDINAL] <= ordinal < kept_stop:
            missing = ordinal - leaf_ordinal + 1
            cycle = least_multiple(left_leaves, left_samples, first, size, total, leaf_total, rank, missing, step) - 1
            if (cycle + 1) * step > dealt:
                _, seen = leaf_counts(left_leaves, left_samples, first, size, total, dealt, rank)
                if seen < missing:  # in the tail, which follows the tree's own order
                    ks[i] = (
                        start
                        + least_multiple(left_leaves, left_samples, first, size, total, leaf_total, rank, missing, 1)
                        - 1
                    )
                    continue
            epoch, epoch_first, epoch_stop = 0, 0, ALL
            if epoch_tokens[source] > 0:
                epoch = epoch_of(ordinal, epoch_tokens[source], sample_tokens)
                epoch_first = epoch_start(epoch, epoch_tokens[source], sample_tokens)
                epoch_stop = epoch_start(epoch + 1, epoch_tokens[source], sample_tokens)
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
                int(spans[source]),
                epoch,
                epoch_first,
                epoch_stop,
                head,
                parts,
            )
            kept, kept_stop = leaf, int(head[ORDINAL]) + _dealt_before(head, parts, lanes, lanes)

        place = ordinal - int(head[ORDINAL])
        residue = _residue_of(head, parts, lanes, place)
        place -= _dealt_before(head, parts, lanes, residue)
        for other in range(int(head[END] - head[BEGIN])):
            low, high, first_turn = _lane_ranks(head, parts, lanes, other, residue)
            if place < high - low:
                cycle = int(head[BEGIN]) + other
                turns = (min((cycle + 1) * step, dealt) - cycle * step) // lanes
                weave = 0 if turns == slots else int(weaves[stage])
                lane, key = int(owners[weave, residue]), cycle_key(seed, start, cycle)
                chosen = hash_combine(hash_combine(key, source), lane)
                if _is_cut(head, parts, lanes, other):
                    chosen = hash_combine(chosen, head[EPOCH])
                turn = first_turn + unpermuted(place, high - low, chosen)
                ahead = (turn * lanes + residue - int(firsts[weave, lane])) // lanes
                slot = (ahead - bounded_hash(key, 0, turns)) % turns * int(inverse_strides[weave]) % turns
                ks[i] = start + cycle * step + slot * lanes + lane
                break
            place -= high - low


@device
def _leaf_of(
    source_leaves: Int64s,
    source_offsets: Int64s,
    leaf_ordinals: Int64s,
    leaf_samples: Int64s,
    source: int,
    ordinal: int,
) -> int:
    """The leaf that has a source's ordinal, or -1."""
    low, high = int(source_offsets[source]), int(source_offsets[source + 1])
    if low == high or ordinal < 0:
        return -1
    while high - low > 1:
        middle = (low + high) // 2
        if leaf_ordinals[source_leaves[middle]] <= ordinal:
            low = middle
        else:
            high = middle
    leaf = int(source_leaves[low])
    return leaf if ordinal < leaf_ordinals[leaf] + leaf_samples[leaf] else -1


@device
def _is_cut(head: Int64s, parts: Int64s, lanes: int, other: int) -> bool:
    """Whether a cycle of the period has ranks that are of another epoch."""
    left, left_rest, right, right_rest = parts[other]
    count = (right - left) * lanes + right_rest - left_rest
    last = other == int(head[END] - head[BEGIN]) - 1
    return bool((other == 0 and head[LOW] > 0) or (last and head[HIGH] < count))


@device
def _lane_ranks(head: Int64s, parts: Int64s, lanes: int, other: int, residue: int) -> tuple[int, int, int]:
    """In a cycle of the period, of a residue: (its ranks [low, high), the turn that rank `low` stands for)."""
    left, left_rest, right, right_rest = parts[other]
    before, mine, first = count_ranks(left, left_rest, right, right_rest, residue)
    lowest = int(head[LOW]) if other == 0 else 0
    highest = int(head[HIGH]) if other == int(head[END] - head[BEGIN]) - 1 else ALL
    low = min(max(before, lowest), highest)
    return low, min(max(before + mine, lowest), highest), first + low - before


@device
def _dealt_before(head: Int64s, parts: Int64s, lanes: int, residue: int) -> int:
    """How many of the period's ordinals go to residues below `residue`, which is from 0 to `lanes`."""
    count = 0
    for other in range(int(head[END] - head[BEGIN])):
        left, left_rest, right, right_rest = parts[other]
        before, _, _ = count_ranks(left, left_rest, right, right_rest, residue)
        lowest = int(head[LOW]) if other == 0 else 0
        highest = int(head[HIGH]) if other == int(head[END] - head[BEGIN]) - 1 else ALL
        count += min(max(before, lowest), highest) - lowest
    return count


@device
def _residue_of(head: Int64s, parts: Int64s, lanes: int, place: int) -> int:
    """The residue to whose lane the period's ordinal number `place` goes."""
    low, high = 0, lanes
    while high - low > 1:
        middle = (low + high) // 2
        if _dealt_before(head, parts, lanes, middle) <= place:
            low = middle
        else:
            high = middle
    return low
