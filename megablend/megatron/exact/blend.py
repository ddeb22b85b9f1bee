"""Megatron's blends: the dataset of each sample, and the sample's number within that dataset."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megablend.arrays import Float64s, Int16s, Int64s
from megablend.errors import PlanError
from megablend.kernels.exact.greedy import fill, fill_by_scan
from megablend.megatron.exact.pieces import Pieces

MOST_DATASETS = 32_766
"""Megatron numbers datasets in int16."""
FEW = 32
"""Up to this number of datasets it is faster to scan all of them."""
LEAD = 4096
"""How many steps before its part a thread begins from a guessed state; 8 * groups if that is more."""
_EXACT = 2.0**52  # below it, counts that differ by one give errors that differ


def greedy(weights: Sequence[float], size: int) -> Greedy:
    """Make a blend of `size` samples by weight: each step takes the dataset that is furthest behind its weight.

    Args:
        weights: one per dataset; Megatron normalises them to a sum of 1.

    Raises: PlanError where there are no datasets or too many.

    Source: helpers.build_blending_indices.
    """
    return Greedy(np.array(weights, np.float64), np.full(len(weights), np.inf), size)


def exhaustive(sizes: Sequence[int]) -> Greedy:
    """Make a blend of all samples of all datasets, weighted by their `sizes`.

    Raises: PlanError where there are no datasets or too many, or one has no samples (Megatron then writes past its arrays).

    Source: helpers.build_exhaustive_blending_indices.
    """
    if min(sizes, default=1) < 1:
        raise PlanError(
            f"dataset {int(np.argmin(sizes))} has {min(sizes)} samples; an exhaustive blend needs at least one of each dataset"
        )
    total = sum(sizes)
    caps = np.array(sizes, np.int64)
    return Greedy(caps / np.float64(total), caps.astype(np.float64), total)


class _State(NamedTuple):
    """The state of a blend, in the form that the kernels use."""

    counts: Float64s
    turns: Int64s

    def copy(self) -> _State:
        return _State(self.counts.copy(), self.turns.copy())

    def equals(self, other: _State) -> bool:
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.turns, other.turns)


class Greedy(Pieces):
    """A blend that takes the dataset with the greatest error, with or without caps."""

    min_part = 1 << 17
    """Fewest steps of a thread's part: many more than its guess costs."""
    max_part = 1 << 21
    """Most of them: few enough to compute again where the guess was wrong."""

    def __init__(self, weights: Float64s, caps: Float64s, size: int) -> None:
        if not 0 < len(weights) <= MOST_DATASETS:
            raise PlanError(f"found a blend of {len(weights):,} datasets; expected 1 to {MOST_DATASETS:,}")
        super().__init__(size)
        # False for weights that are negative, NaN or too large.
        ordered = bool(np.all((weights >= 0) & (weights * max(1, size) < _EXACT)))
        self._by_scan = not ordered or len(weights) <= FEW
        # Whether a guessed state soon converges to the true one.
        self._forgets = ordered and abs(float(weights.sum()) - 1) < 1e-6
        if self._by_scan:
            self._group(_without_nan(weights), caps, np.arange(len(weights)))
        else:
            _, groups = np.unique(np.stack([weights, caps]), axis=1, return_inverse=True)
            self._group(weights + 0.0, caps, groups)  # -0.0 becomes 0.0

    def _group(self, weights: Float64s, caps: Float64s, groups: Int64s) -> None:
        """Sort datasets by group, in their original order within each group."""
        self._members = np.argsort(groups, kind="stable")
        self._firsts = np.concatenate([[0], np.cumsum(np.bincount(groups))])
        heads = self._members[self._firsts[:-1]]
        self._weights, self._caps = weights[heads], caps[heads]
        self._state = _State(np.zeros(len(heads)), np.zeros(len(heads), np.int64))

    def _fill(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        """Each thread but the first begins its part from a guess, which is checked, so that the result is always exact."""
        size = len(datasets)
        parts = max(1, min(threads, size // self.min_part)) if self._forgets else 1
        if parts == 1:
            self._run(self._state, self.step, datasets, samples)
            self.step += size
            return
        wave = parts * self.max_part
        with ThreadPoolExecutor(parts) as pool:
            for first in range(0, size, wave):
                self._wave(pool, parts, datasets[first : first + wave], samples[first : first + wave])

    def _wave(self, pool: ThreadPoolExecutor, parts: int, datasets: Int16s, samples: Int64s) -> None:
        """Compute `parts` parts at the same time."""
        edges = [len(datasets) * part // parts for part in range(parts + 1)]
        spans = list(pairwise(edges))

        def run(state: _State, span: tuple[int, int]) -> _State:
            state = state.copy()
            self._run(state, self.step + span[0], datasets[slice(*span)], samples[slice(*span)])
            return state

        starts = [self._state, *pool.map(lambda edge: self._guess(self.step + edge), edges[1:-1])]
        ends = pool.map(run, starts, spans)
        for start, span, end in zip(starts, spans, list(ends), strict=True):
            self._state = end if start.equals(self._state) else run(self._state, span)
        self.step += len(datasets)

    def _run(self, state: _State, step: int, datasets: Int16s, samples: Int64s) -> None:
        if self._by_scan:
            fill_by_scan(self._weights, self._caps, state.counts, step, datasets, samples)
        else:
            fill(self._weights, self._caps, self._firsts, self._members, *state, step, datasets, samples)

    def _guess(self, step: int) -> _State:
        """The probable state at `step`: the blend, run from a largest-remainder state some steps earlier."""
        lead = min(step, max(LEAD, 8 * len(self._weights)))
        exact, sizes = self._weights * (step - lead), np.diff(self._firsts)
        counts = np.floor(exact)
        order = np.argsort(counts - exact, kind="stable")
        before = np.cumsum(sizes[order]) - sizes[order]
        turns = np.empty(len(sizes), np.int64)
        turns[order] = np.clip(step - lead - int(counts @ sizes) - before, 0, sizes[order])
        counts[turns == sizes] += 1
        turns[turns == sizes] = 0
        counts[counts >= self._caps] = np.inf
        state = _State(counts, turns)
        self._run(state, step - lead, np.empty(lead, np.int16), np.empty(lead, np.int64))
        return state


def _without_nan(weights: Float64s) -> Float64s:
    """Weights without NaN that give Megatron's result: a NaN never wins, except as the first weight, which then always wins."""
    if np.isnan(weights[0]):
        return np.where(np.arange(len(weights)) == 0, 0.0, -np.inf)
    return np.where(np.isnan(weights), -np.inf, weights)
