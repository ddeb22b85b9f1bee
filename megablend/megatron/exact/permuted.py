"""A blend with given counts, fully shuffled: the samples of all datasets, ordered by one keyed permutation.

Exact at the end, random before it: after n samples a dataset with share p is off by about sqrt(n * p * (1 - p)).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise

import numpy as np

from megablend.arrays import Int16s, Int64s
from megablend.errors import PlanError
from megablend.kernels.exact.keyed_permutation import ROUNDS, find_owner, keyed_permutation
from megablend.kernels.plan.bijection import shuffle
from megablend.kernels.plan.keyed_hash import MASK, hash_combine
from megablend.megatron.exact.blend import MOST_DATASETS
from megablend.megatron.exact.pieces import Pieces
from megablend.plan.allocate import largest_remainder

SMALL = 1 << 16
"""Up to this many samples are shuffled exactly, as an array; a Feistel network needs more."""
BLOCK = 1 << 14
"""Samples processed at a time, so that their positions stay in the CPU cache."""
_HEADS = 14  # bits of the table of datasets by position, which stays in the CPU cache too


def largest_remainder_blend(weights: Sequence[int | float | Fraction], size: int, seed: int) -> Permuted:
    """Make a shuffled blend of `size` samples: floor and largest remainder of size * weight, exact, ties by order.

    Raises: PlanError where weights are negative, not finite or all zero, or where there are too many.
    """
    for dataset, weight in enumerate(weights):
        if not np.isfinite(float(weight)):
            raise PlanError(f"dataset {dataset} has weight {weight}; expected a finite number")
    return Permuted(largest_remainder([Fraction(weight) for weight in weights], size), seed)


class Permuted(Pieces):
    """counts[d] samples of each dataset d, in the order that `seed` chooses."""

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        super().__init__(sum(counts))
        if len(counts) > MOST_DATASETS:
            raise PlanError(f"found a blend of {len(counts):,} datasets; expected at most {MOST_DATASETS:,}")
        self._starts = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])
        self._shift = max(0, self.size.bit_length() - _HEADS)
        edges = np.arange(0, self.size, 1 << self._shift)
        self._heads = (np.searchsorted(self._starts, edges, side="right") - 1).astype(np.int32)
        key = hash_combine(seed & MASK, self.size)
        self._keys = np.array([hash_combine(key, turn) & 0xFFFFFFFF for turn in range(ROUNDS)], np.uint32)
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
            find_owner(positions, self._starts, self._shift, self._heads, datasets[part], samples[part])

    def _positions(self, start: int, stop: int) -> Int64s:
        if len(self._shuffled):
            return self._shuffled[start:stop]
        positions = np.empty(stop - start, np.int64)
        keyed_permutation(start, self.size, self._keys, positions)
        return positions
