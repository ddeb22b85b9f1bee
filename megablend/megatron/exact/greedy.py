"""Megatron's own blend: each step takes a sample from the dataset that is furthest behind its
weighted share.

Every step depends on all earlier steps. Threads can still compute parts of the steps at the same
time, because the number of samples taken from each dataset before a part begins can be guessed
almost exactly. Each guess is checked as soon as the part before is finished
(`Greedy._compute_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from megablend.arrays import Float64s, Int16s, Int64s
from megablend.errors import PlanError
from megablend.kernels.exact.greedy import fill, fill_by_scan
from megablend.megatron.request.request import MAX_DATASETS

MAX_SCANNED = 32
"""Number of datasets up to which it is faster to scan all of them at each step."""
LEAD = 4096
"""A thread begins to compute from a guessed state this many steps before its part (or 8 * the
number of groups, if that is more)."""
_State = tuple[Float64s, Int64s]
"""The state of a blend, in the form that the kernels use. For each group of datasets: the number of
samples already taken from the member whose turn is next, and the position of that member in its
group. Members before it have one sample more."""


def greedy(weights: Sequence[float], size: int) -> Greedy:
    """Make a blend of `size` samples by weight: each step takes a sample from the dataset that is
    furthest behind its weighted share.

    Args:
        weights: the weight of each dataset, 0 or more. Their sum is 1, as Megatron normalizes them.

    Raises: PlanError if there are no datasets or too many.

    Source: helpers.build_blending_indices.
    """
    return Greedy(np.array(weights, np.float64), np.full(len(weights), np.inf), size)


def exhaustive(sizes: Sequence[int]) -> Greedy:
    """Make a blend of all samples of all datasets, weighted by their `sizes`.

    Raises: PlanError if there are no datasets or too many, or a dataset has no samples (Megatron
        would then write past the ends of its arrays).

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


class Greedy:
    """A blend whose steps each take a sample from the dataset with the greatest error, that is, the
    one furthest behind its share. A dataset may have a cap, its maximum number of samples.

    Datasets with the same weight and cap form a group and take turns in order. If a blend has few
    datasets, all of them are scanned at each step, and each dataset is a group of its own.

    Samples are computed in order, any number at a time, so that the caller can limit the memory.
    """

    min_part = 1 << 17
    """Minimum number of steps in a thread's part: many more than computing its guessed state
    takes."""
    max_part = 1 << 21
    """Maximum number of steps in a thread's part: few enough to be computed again if the guess was
    wrong."""

    def __init__(self, weights: Float64s, caps: Float64s, size: int) -> None:
        if not 0 < len(weights) <= MAX_DATASETS:
            raise PlanError(
                f"found a blend of {len(weights):,} datasets; expected 1 to {MAX_DATASETS:,}"
            )
        self.size = size
        """Total number of samples."""
        self.step = 0
        """Number of the next sample to compute."""
        self._by_scan = len(weights) <= MAX_SCANNED
        groups = np.arange(len(weights))
        if not self._by_scan:
            _, groups = np.unique(np.stack([weights, caps]), axis=1, return_inverse=True)
        # Datasets by group, in their original order within each group
        self._members = np.argsort(groups, kind="stable")
        self._firsts = np.concatenate([[0], np.cumsum(np.bincount(groups))])
        leaders = self._members[self._firsts[:-1]]
        self._weights = weights[leaders]
        self._caps = caps[leaders]
        self._state: _State = np.zeros(len(leaders)), np.zeros(len(leaders), np.int64)

    def draw(self, count: int, *, threads: int = 1) -> tuple[Int16s, Int64s]:
        """Compute the next `count` samples. Each thread but the first begins its part from a
        guessed state. The guess is checked, so the result is always exact.

        Args:
            threads: number of threads; the result does not depend on it.

        Returns: the number of the dataset of each sample, int16 [count]; and the number of the
            sample within its dataset, int64 [count].
        Raises: PlanError if fewer samples are left.
        """
        if count > self.size - self.step:
            raise PlanError(
                f"{count:,} samples requested, but the blend has only {self.size - self.step:,} of {self.size:,} left"
            )
        datasets = np.empty(count, np.int16)
        samples = np.empty(count, np.int64)
        parts = max(1, min(threads, count // self.min_part))
        if parts == 1:
            self._run_kernel(self._state, self.step, datasets, samples)
            self.step += count
            return datasets, samples
        at_once = parts * self.max_part
        with ThreadPoolExecutor(parts) as pool:
            for first in range(0, count, at_once):
                stop = first + at_once
                self._compute_parts(pool, parts, datasets[first:stop], samples[first:stop])
        return datasets, samples

    def _compute_parts(
        self, pool: ThreadPoolExecutor, parts: int, datasets: Int16s, samples: Int64s
    ) -> None:
        """Compute the next steps in `parts` parts at the same time, from guessed states. Parts
        whose guess was wrong are computed again."""
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
        # self._state is the correct initial state of a part: the true final state of the part
        # before
        for start, span, end in zip(starts, spans, ends, strict=True):
            is_right = all(map(np.array_equal, start, self._state))
            self._state = end if is_right else compute(self._state, span)
        self.step += len(datasets)

    def _guess_state(self, step: int) -> _State:
        """Return the probable state at `step`, by running the blend from an estimated state a few
        thousand steps earlier.

        The count of a dataset stays close to weight * steps, but whether it is rounded up or down
        depends on all earlier steps. The estimate rounds up the counts with the largest remainders,
        so that the sum is the number of steps. A few counts are wrong; but each step takes the
        dataset that is furthest behind, so the following steps correct them.
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
        """Compute steps from number `step` on until the arrays are full, and update `state` in
        place."""
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
