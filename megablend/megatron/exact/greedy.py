"""Megatron's own blend: each step takes a sample of the dataset that is furthest behind its weight.

Every step depends on all steps before it. Threads can still share the steps: the counts of the
datasets at the beginning of a part are almost certain, so they are guessed, and checked as soon as
the part before is done (`Greedy._compute_next`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from megablend.arrays import Float64s, Int16s, Int64s
from megablend.errors import PlanError
from megablend.kernels.exact.greedy import fill, fill_by_scan
from megablend.megatron.exact.blend import ExactBlend
from megablend.megatron.request.request import MAX_DATASETS

MAX_SCANNED = 32
"""Number of datasets up to which it is faster to scan all of them at each step."""
LEAD = 4096
"""Number of steps before its part at which a thread begins, from a guessed state; or 8 * groups if
that is more."""
_EXACT = 2.0**52
"""Below this number, counts that differ by one have errors that differ."""
_State = tuple[Float64s, Int64s]
"""The state of a blend, in the form that the kernels use: for each group, the number of samples of
the member whose turn it is, and the number of that member; members before it have one sample
more."""


def greedy(weights: Sequence[float], size: int) -> Greedy:
    """Make a blend of `size` samples by weight: each step takes a sample of the dataset that is
    furthest behind its weight.

    Args:
        weights: the weight of each dataset; Megatron normalises them to a sum of 1.

    Raises: PlanError if there are no datasets or too many.

    Source: helpers.build_blending_indices.
    """
    return Greedy(np.array(weights, np.float64), np.full(len(weights), np.inf), size)


def exhaustive(sizes: Sequence[int]) -> Greedy:
    """Make a blend of all samples of all datasets, weighted by their `sizes`.

    Raises: PlanError if there are no datasets or too many, or one has no samples (Megatron then
        writes past its arrays).

    Source: helpers.build_exhaustive_blending_indices.
    """
    if min(sizes, default=1) < 1:
        raise PlanError(
            f"dataset {int(np.argmin(sizes))} has {min(sizes)} samples; an exhaustive blend needs at least one "
            "sample from each dataset"
        )
    total = sum(sizes)
    caps = np.array(sizes, np.int64)
    return Greedy(caps / np.float64(total), caps.astype(np.float64), total)


class Greedy(ExactBlend):
    """A blend whose steps take the dataset with the greatest error, with or without caps.

    Datasets with the same weight and cap are a group: they take turns, in order. If datasets are
    scanned one by one, each is a group of its own.
    """

    min_part = 1 << 17
    """Minimum number of steps of a thread's part: many more than its guess takes."""
    max_part = 1 << 21
    """Maximum number of steps of a thread's part: few enough to compute them again if the guess was
    wrong."""

    def __init__(self, weights: Float64s, caps: Float64s, size: int) -> None:
        if not 0 < len(weights) <= MAX_DATASETS:
            raise PlanError(
                f"found a blend of {len(weights):,} datasets; expected 1 to {MAX_DATASETS:,}"
            )
        super().__init__(size)
        # Whether errors only grow while a dataset waits. If a weight is negative, NaN or too large,
        # they may fall, and the faster kernel would miss a winner.
        errors_grow = bool(np.all((weights >= 0) & (weights * max(1, size) < _EXACT)))
        self._by_scan = not errors_grow or len(weights) <= MAX_SCANNED
        # Whether a guessed state soon becomes the true one: all datasets together get one sample a
        # step, and if weights sum to 1, none drifts from its share
        self._converges = errors_grow and abs(float(weights.sum()) - 1) < 1e-6
        if self._by_scan:
            self._make_groups(_without_nan(weights), caps, np.arange(len(weights)))
        else:
            _, groups = np.unique(np.stack([weights, caps]), axis=1, return_inverse=True)
            # Adding 0.0 turns -0.0 into 0.0
            self._make_groups(weights + 0.0, caps, groups)

    def _make_groups(self, weights: Float64s, caps: Float64s, groups: Int64s) -> None:
        """Sort datasets by group, in their original order within each group."""
        self._members = np.argsort(groups, kind="stable")
        self._firsts = np.concatenate([[0], np.cumsum(np.bincount(groups))])
        leaders = self._members[self._firsts[:-1]]
        self._weights = weights[leaders]
        self._caps = caps[leaders]
        self._state: _State = np.zeros(len(leaders)), np.zeros(len(leaders), np.int64)

    def _compute_next(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        """See ExactBlend. Each thread but the first begins its part from a guessed state, which is
        checked, so that the result is always exact."""
        size = len(datasets)
        parts = max(1, min(threads, size // self.min_part)) if self._converges else 1
        if parts == 1:
            self._run_kernel(self._state, self.step, datasets, samples)
            self.step += size
            return
        at_once = parts * self.max_part
        with ThreadPoolExecutor(parts) as pool:
            for first in range(0, size, at_once):
                stop = first + at_once
                self._compute_parts(pool, parts, datasets[first:stop], samples[first:stop])

    def _compute_parts(
        self, pool: ThreadPoolExecutor, parts: int, datasets: Int16s, samples: Int64s
    ) -> None:
        """Compute the next steps in `parts` parts at the same time from guessed states; parts whose
        guess was wrong are computed again."""
        edges = [len(datasets) * part // parts for part in range(parts + 1)]
        spans = list(pairwise(edges))

        def compute(state: _State, span: tuple[int, int]) -> _State:
            state = state[0].copy(), state[1].copy()
            part = slice(*span)
            self._run_kernel(state, self.step + part.start, datasets[part], samples[part])
            return state

        guesses = pool.map(lambda edge: self._guess_state(self.step + edge), edges[1:-1])
        starts = [self._state, *guesses]
        ends = list(pool.map(compute, starts, spans))
        # self._state is the state that a part had to begin from: the true end of the part before
        for start, span, end in zip(starts, spans, ends, strict=True):
            is_right = all(map(np.array_equal, start, self._state))
            self._state = end if is_right else compute(self._state, span)
        self.step += len(datasets)

    def _guess_state(self, step: int) -> _State:
        """Return the probable state at `step`: the blend is run from an estimate some steps
        earlier.

        A dataset's count stays near weight * steps, but which datasets are already rounded up
        depends on all earlier steps. The estimate rounds up those with the largest remainders, as
        many as there were steps. It is wrong for some datasets; but since each step takes the
        dataset that is furthest behind, their next turns correct it.
        """
        lead = min(step, max(LEAD, 8 * len(self._weights)))
        first = step - lead
        exact = self._weights * first
        counts = np.floor(exact)
        group_sizes = np.diff(self._firsts)

        # Groups by descending remainder. The steps that are left after rounding down go to their
        # members in this order, one each; in a group, to the first ones.
        by_remainder = np.argsort(counts - exact, kind="stable")
        members = group_sizes[by_remainder]
        members_before = np.cumsum(members) - members
        steps_left = first - int(counts @ group_sizes)
        turns = np.empty(len(group_sizes), np.int64)
        turns[by_remainder] = np.clip(steps_left - members_before, 0, members)

        # As in the kernel: if all members had their turn, the first one is next, with a count
        # higher by one; a count that has reached its cap is infinite
        is_done = turns == group_sizes
        counts[is_done] += 1
        turns[is_done] = 0
        counts[counts >= self._caps] = np.inf
        state = counts, turns
        self._run_kernel(state, first, np.empty(lead, np.int16), np.empty(lead, np.int64))
        return state

    def _run_kernel(self, state: _State, step: int, datasets: Int16s, samples: Int64s) -> None:
        """Compute the steps from `step` on, and update `state`."""
        counts, turns = state
        if self._by_scan:
            fill_by_scan(self._weights, self._caps, counts, step, datasets, samples)
        else:
            fill(
                self._weights,
                self._caps,
                self._firsts,
                self._members,
                counts,
                turns,
                step,
                datasets,
                samples,
            )


def _without_nan(weights: Float64s) -> Float64s:
    """Replace NaN by weights that give Megatron's result: a NaN never wins, except as the first
    weight, which then always wins."""
    if np.isnan(weights[0]):
        return np.where(np.arange(len(weights)) == 0, 0.0, -np.inf)
    return np.where(np.isnan(weights), -np.inf, weights)
