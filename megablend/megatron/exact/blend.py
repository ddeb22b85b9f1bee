"""Blends: the dataset of each sample, and the sample's number within that dataset, computed in
order, piece by piece.

`Greedy` is Megatron's. `Permuted` has given counts, fully shuffled by one keyed permutation: exact
at the end, random before it; after n samples a dataset with share p is off by about sqrt(n * p * (1
- p)).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise

import numpy as np

from megablend.arrays import Float64s, Int16s, Int64s
from megablend.blend.allocate import largest_remainder
from megablend.errors import PlanError
from megablend.kernels.blend.bijection import shuffle
from megablend.kernels.blend.keyed_hash import MASK, hash_combine
from megablend.kernels.exact.greedy import fill, fill_by_scan
from megablend.kernels.exact.keyed_permutation import ROUNDS, find_owner, keyed_permutation
from megablend.megatron.request.request import MAX_DATASETS

MAX_SCANNED = 32
"""Up to this number of datasets it is faster to scan all of them."""
LEAD = 4096
"""How many steps before its part a thread begins from a guessed state; 8 * groups if that is
more."""
_State = tuple[Float64s, Int64s]
"""The state of a blend, in the form that the kernels use: counts and turns of its groups."""
_EXACT = 2.0**52  # below it, counts that differ by one give errors that differ
SMALL = 1 << 16
"""Up to this many samples are shuffled exactly, as an array; a Feistel network needs more."""
BLOCK = 1 << 14
"""Samples processed at a time, so that their positions stay in the CPU cache."""
_HEADS = 14  # bits of the table of datasets by position, which stays in the CPU cache too


class Pieces(ABC):
    """The dataset of each sample of a blend, and the sample's number within it, with the memory of
    one piece at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Total number of samples."""
        self.step = 0
        """The next sample to compute."""

    def fill(self, datasets: Int16s, samples: Int64s, *, threads: int = 1) -> None:
        """Compute the next n samples: the dataset of each,
        and the sample's number within that dataset.

        Args:
            datasets: int16 [n], filled.
            samples: int64 [n], filled.
            threads: number of threads; the result does not depend on it.

        Raises: PlanError if fewer than n samples are left.
        """
        if len(datasets) > self.size - self.step:
            raise PlanError(
                f"{len(datasets):,} samples requested of a blend that has {self.size - self.step:,} of {self.size:,} left"
            )
        self._fill(datasets, samples, threads)

    def draw(self, count: int, *, threads: int = 1) -> tuple[Int16s, Int64s]:
        """The next `count` samples in new arrays; otherwise like `fill`."""
        datasets = np.empty(count, np.int16)
        samples = np.empty(count, np.int64)
        self.fill(datasets, samples, threads=threads)
        return datasets, samples

    @abstractmethod
    def _fill(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        """Fill the arrays and advance `step`."""


def greedy(weights: Sequence[float], size: int) -> Greedy:
    """Make a blend of `size` samples by weight: each step takes the dataset
    that is furthest behind its weight.

    Args:
        weights: one per dataset; Megatron normalises them to a sum of 1.

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
            f"dataset {int(np.argmin(sizes))} has {min(sizes)} samples; an exhaustive blend needs at least one of each dataset"
        )
    total = sum(sizes)
    caps = np.array(sizes, np.int64)
    return Greedy(caps / np.float64(total), caps.astype(np.float64), total)


class Greedy(Pieces):
    """A blend that takes the dataset with the greatest error, with or without caps."""

    min_part = 1 << 17
    """Fewest steps of a thread's part: many more than its guess costs."""
    max_part = 1 << 21
    """Most of them: few enough to compute again where the guess was wrong."""

    def __init__(self, weights: Float64s, caps: Float64s, size: int) -> None:
        if not 0 < len(weights) <= MAX_DATASETS:
            raise PlanError(
                f"found a blend of {len(weights):,} datasets; expected 1 to {MAX_DATASETS:,}"
            )
        super().__init__(size)
        # False for weights that are negative, NaN or too large.
        ordered = bool(np.all((weights >= 0) & (weights * max(1, size) < _EXACT)))
        self._by_scan = not ordered or len(weights) <= MAX_SCANNED
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
        self._weights = weights[heads]
        self._caps = caps[heads]
        self._state: _State = np.zeros(len(heads)), np.zeros(len(heads), np.int64)

    def _fill(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        """Each thread but the first begins its part from a guess, which is checked, so that the
        result is always exact."""
        size = len(datasets)
        parts = max(1, min(threads, size // self.min_part)) if self._forgets else 1
        if parts == 1:
            self._run(self._state, self.step, datasets, samples)
            self.step += size
            return
        wave = parts * self.max_part
        with ThreadPoolExecutor(parts) as pool:
            for first in range(0, size, wave):
                self._wave(
                    pool, parts, datasets[first : first + wave], samples[first : first + wave]
                )

    def _wave(
        self, pool: ThreadPoolExecutor, parts: int, datasets: Int16s, samples: Int64s
    ) -> None:
        """Compute `parts` parts at the same time."""
        edges = [len(datasets) * part // parts for part in range(parts + 1)]
        spans = list(pairwise(edges))

        def run(state: _State, span: tuple[int, int]) -> _State:
            state = state[0].copy(), state[1].copy()
            self._run(state, self.step + span[0], datasets[slice(*span)], samples[slice(*span)])
            return state

        starts = [self._state, *pool.map(lambda edge: self._guess(self.step + edge), edges[1:-1])]
        ends = pool.map(run, starts, spans)
        for start, span, end in zip(starts, spans, list(ends), strict=True):
            is_right = all(map(np.array_equal, start, self._state))
            self._state = end if is_right else run(self._state, span)
        self.step += len(datasets)

    def _run(self, state: _State, step: int, datasets: Int16s, samples: Int64s) -> None:
        if self._by_scan:
            fill_by_scan(self._weights, self._caps, state[0], step, datasets, samples)
        else:
            fill(
                self._weights,
                self._caps,
                self._firsts,
                self._members,
                *state,
                step,
                datasets,
                samples,
            )

    def _guess(self, step: int) -> _State:
        """The probable state at `step`: the blend, run
        from a largest-remainder state some steps earlier."""
        lead = min(step, max(LEAD, 8 * len(self._weights)))
        exact = self._weights * (step - lead)
        sizes = np.diff(self._firsts)
        counts = np.floor(exact)
        order = np.argsort(counts - exact, kind="stable")
        before = np.cumsum(sizes[order]) - sizes[order]
        turns = np.empty(len(sizes), np.int64)
        turns[order] = np.clip(step - lead - int(counts @ sizes) - before, 0, sizes[order])
        counts[turns == sizes] += 1
        turns[turns == sizes] = 0
        counts[counts >= self._caps] = np.inf
        state = counts, turns
        self._run(state, step - lead, np.empty(lead, np.int16), np.empty(lead, np.int64))
        return state


def _without_nan(weights: Float64s) -> Float64s:
    """Weights without NaN that give Megatron's result: a NaN never wins, except as the first
    weight, which then always wins."""
    if np.isnan(weights[0]):
        return np.where(np.arange(len(weights)) == 0, 0.0, -np.inf)
    return np.where(np.isnan(weights), -np.inf, weights)


def largest_remainder_blend(
    weights: Sequence[int | float | Fraction], size: int, seed: int
) -> Permuted:
    """Make a shuffled blend of `size` samples: floor and largest remainder
    of size * weight, exact, ties by order.

    Raises: PlanError if weights are negative, not finite or all zero, or if there are too
        many.
    """
    for dataset, weight in enumerate(weights):
        if not np.isfinite(float(weight)):
            raise PlanError(f"dataset {dataset} has weight {weight}; expected a finite number")
    return Permuted(largest_remainder([Fraction(weight) for weight in weights], size), seed)


class Permuted(Pieces):
    """counts[d] samples of each dataset d, in the order that `seed` chooses."""

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        super().__init__(sum(counts))
        if len(counts) > MAX_DATASETS:
            raise PlanError(
                f"found a blend of {len(counts):,} datasets; expected at most {MAX_DATASETS:,}"
            )
        self._starts = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])
        self._shift = max(0, self.size.bit_length() - _HEADS)
        edges = np.arange(0, self.size, 1 << self._shift)
        self._heads = (np.searchsorted(self._starts, edges, side="right") - 1).astype(np.int32)
        key = hash_combine(seed & MASK, self.size)
        self._keys = np.array(
            [hash_combine(key, turn) & 0xFFFFFFFF for turn in range(ROUNDS)], np.uint32
        )
        self._shuffled = np.arange(self.size if self.size <= SMALL else 0)
        shuffle(self._shuffled, key, 0, 0)

    def _fill(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        edges = [len(datasets) * part // threads for part in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda span: self._part(datasets, samples, *span), pairwise(edges)))
        self.step += len(datasets)

    def _part(self, datasets: Int16s, samples: Int64s, start: int, stop: int) -> None:
        for block in range(start, stop, BLOCK):
            part = slice(block, min(block + BLOCK, stop))
            positions = self._positions(self.step + part.start, self.step + part.stop)
            find_owner(
                positions, self._starts, self._shift, self._heads, datasets[part], samples[part]
            )

    def _positions(self, start: int, stop: int) -> Int64s:
        if len(self._shuffled):
            return self._shuffled[start:stop]
        positions = np.empty(stop - start, np.int64)
        keyed_permutation(start, self.size, self._keys, positions)
        return positions
