"""Megatron's greedy blend, bit for bit: each step takes the dataset that is furthest behind its
weight.

At step t (1 at the first two steps), a dataset with weight w and count c has the error w * t - c,
in IEEE doubles without a fused multiply-add; the dataset with the greatest error wins, the first
among equals, and its count is incremented. A dataset whose count reaches its cap is excluded: this
gives the exhaustive blend.

`fill_by_scan` computes the error of every dataset at every step. `fill` computes only a few errors:

- Datasets of one weight and cap are a group and take turns, in order. Group g has weights[g],
  caps[g] and its members, ascending, from firsts[g] to firsts[g + 1]; its state is turns[g], the
  member whose turn it is, and counts[g], that member's count (the members before it have one more).
- Until a group is drawn, its error never falls as t rises, not even in doubles, since rounding is
  monotone: a group that is below a level at the end of a window can be left out of the whole
  window, as long as the winners reach the level. A winner below the level is not used: the window
  ends there, and the next level is lower. A window of OUTER steps leaves out most groups. Within
  it, each window of INNER steps leaves out most of the rest. The levels affect the speed, never the
  result; they follow the lowest winner of the previous window.
"""

from __future__ import annotations

import numpy as np

from megablend.arrays import Float64s, Int16s, Int64s, Uint64s
from megablend.jit import device, kernel

OUTER = 256
INNER = 20
"""Number of steps of the outer and inner windows. An outer window has one step for every 32
groups, if that is more than OUTER."""
# The margin is how far a level is below the lowest winner of the last window. The margin is widened
# if a winner was below the level, and narrowed otherwise
_LEAST_MARGIN = 1e-9
_WIDEN = 2.0
_NARROW_OUTER = 0.9
_NARROW = 0.97
_NARROW_CROWD = 0.7
_CROWD = 3 * INNER  # with more groups in an inner window, its margin is narrowed faster


@kernel
def fill_by_scan(
    weights: Float64s,
    caps: Float64s,
    counts: Float64s,
    step: int,
    datasets: Int16s,
    samples: Int64s,
) -> None:
    """Fill datasets and samples for n steps from `step` on; `counts` advances.

    Args:
        weights: [num_datasets].
        caps: [num_datasets], infinite if there is no cap.
        counts: [num_datasets], infinite if the cap is reached.
        step: 0 or more.
        datasets: [n], filled.
        samples: [n], filled.
    """
    size = len(weights)
    for i in range(len(datasets)):
        t = max(np.float64(step + i), 1.0)
        winner = 0
        most = weights[0] * t - counts[0]
        # Two at a time: half as many comparisons that wait for one another
        for dataset in range(1, size - 1, 2):
            error = weights[dataset] * t - counts[dataset]
            other = weights[dataset + 1] * t - counts[dataset + 1]
            better = dataset + 1 if other > error else dataset
            error = other if other > error else error
            winner = better if error > most else winner
            most = error if error > most else most
        if size % 2 == 0 and weights[size - 1] * t - counts[size - 1] > most:
            winner = size - 1
        count = counts[winner]
        datasets[i] = winner
        samples[i] = np.int64(count)
        counts[winner] = count + 1.0
        if count + 1.0 == caps[winner]:
            counts[winner] = np.inf


@kernel
def fill(
    weights: Float64s,
    caps: Float64s,
    firsts: Int64s,
    members: Int64s,
    counts: Float64s,
    turns: Int64s,
    step: int,
    datasets: Int16s,
    samples: Int64s,
) -> None:
    """Fill datasets and samples for n steps from `step` on; `counts` and `turns` advance.

    Args:
        weights: [num_groups], finite, 0 or more, and so small that weight * t stays below 2^52.
        caps: [num_groups], infinite if there is no cap.
        firsts: [num_groups + 1].
        members: [num_datasets].
        counts: [num_groups], infinite if the cap is reached.
        turns: [num_groups].
        step: 0 or more.
        datasets: [n], filled.
        samples: [n], filled.
    """
    size = len(datasets)
    num_groups = len(weights)
    outer = max(OUTER, num_groups // 32)
    all_groups = np.arange(num_groups, dtype=np.uint64)
    near = np.empty(num_groups, np.uint64)  # groups that may win in the outer window
    # Groups that may win in the inner window; the arrays below are in their order
    hot = np.empty(num_groups, np.uint64)
    hot_weights = np.empty(num_groups)
    hot_counts = np.empty(num_groups)
    # Member << 32 | position in `hot`: the least one is the first member's
    tickets = np.empty(num_groups, np.int64)
    # `..._lowest`: the lowest winner of the last window; `..._seen`: that of this window so far
    outer_lowest = -np.inf
    outer_margin = 0.5
    inner_lowest = -np.inf
    inner_margin = 0.5

    i = 0
    while i < size:
        outer_stop = min(size, i + outer)
        outer_level = outer_lowest - outer_margin
        outer_seen = np.inf
        outer_holds = True
        end = max(np.float64(step + outer_stop - 1), 1.0)
        num_near = _select(all_groups, outer_level, end, weights, counts, near)
        while i < outer_stop and outer_holds:
            stop = min(outer_stop, i + INNER)
            level = max(outer_level, inner_lowest - inner_margin)
            end = max(np.float64(step + stop - 1), 1.0)
            num_hot = _select(near[:num_near], level, end, weights, counts, hot)
            for k in range(num_hot):
                hot_weights[k] = weights[hot[k]]
                hot_counts[k] = counts[hot[k]]
                tickets[k] = (members[firsts[hot[k]] + turns[hot[k]]] << 32) | k
            seen = np.inf
            holds = num_hot > 0
            while i < stop and holds:
                t = max(np.float64(step + i), 1.0)
                best = np.uint64(0)
                most = hot_weights[0] * t - hot_counts[0]
                tied = False
                for other in range(np.uint64(1), np.uint64(num_hot)):
                    error = hot_weights[other] * t - hot_counts[other]
                    tied |= error == most
                    best = other if error > most else best
                    most = error if error > most else most
                if tied:
                    for other in range(np.uint64(num_hot)):
                        is_equal = hot_weights[other] * t - hot_counts[other] == most
                        best = other if is_equal and tickets[other] < tickets[best] else best
                seen = min(seen, most)
                holds = most >= level
                if holds:
                    group = hot[best]
                    first = firsts[group]
                    count = hot_counts[best]
                    datasets[i] = tickets[best] >> 32
                    samples[i] = np.int64(count)
                    turn, hot_counts[best] = _next_turn(
                        turns[group], firsts[group + np.uint64(1)] - first, count, caps[group]
                    )
                    turns[group] = turn
                    tickets[best] = (members[first + turn] << 32) | np.int64(best)
                    i += 1
            for k in range(num_hot):
                counts[hot[k]] = hot_counts[k]
            if seen < np.inf:
                inner_lowest = seen
                outer_seen = min(outer_seen, seen)
            narrow = _NARROW if num_hot < _CROWD else _NARROW_CROWD
            inner_margin = max(_LEAST_MARGIN, inner_margin * (narrow if holds else _WIDEN))
            outer_holds = holds or level > outer_level
        if outer_seen < np.inf:
            outer_lowest = outer_seen
        outer_margin = max(_LEAST_MARGIN, outer_margin * (_NARROW_OUTER if outer_holds else _WIDEN))


@device
def _select(
    groups: Uint64s, level: float, t: float, weights: Float64s, counts: Float64s, out: Uint64s
) -> int:
    """Fill `out` with the numbers of the groups whose error at step t reaches the level. Returns
    the number of these groups.

    Numbers of groups are unsigned: a signed index could be negative, and every access would check
    for that.
    """
    num_selected = np.uint64(0)
    for group in groups:
        out[num_selected] = group
        num_selected += np.uint64(weights[group] * t - counts[group] >= level)
    return int(num_selected)


@device
def _next_turn(turn: int, size: int, count: float, cap: float) -> tuple[int, float]:
    """Return the next turn in a group of `size`, and the count of the member whose turn it is."""
    turn += 1
    if turn < size:
        return turn, count
    return 0, count + 1.0 if count + 1.0 < cap else np.inf
