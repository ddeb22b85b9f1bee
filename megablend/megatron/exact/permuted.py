"""A blend with a fixed number of samples of each dataset, shuffled by one keyed permutation. The
counts are exact for the whole blend, and random in any part of it: after n samples, the count of a
dataset with share p deviates by about sqrt(n * p * (1 - p))."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise

import numpy as np

from megablend.arrays import Int16s, Int64s
from megablend.blend.allocate import largest_remainder
from megablend.errors import PlanError
from megablend.kernels.blend.bijection import shuffle
from megablend.kernels.blend.keyed_hash import MASK, hash_combine
from megablend.kernels.exact.keyed_permutation import ROUNDS, find_owner, keyed_permutation
from megablend.megatron.exact.blend import ExactBlend
from megablend.megatron.request.request import MAX_DATASETS

SMALL = 1 << 16
"""A blend of at most this many samples is shuffled as an array, since a Feistel network shuffles
few samples badly."""
BLOCK = 1 << 14
"""Number of samples that are processed at a time, so that their positions stay in the CPU cache."""
_TABLE_BITS = 14
"""Base-2 logarithm of the size of the table from positions to datasets. The table also stays in the
CPU cache."""


def largest_remainder_blend(
    weights: Sequence[int | float | Fraction], size: int, seed: int
) -> Permuted:
    """Make a shuffled blend of `size` samples. The count of each dataset is exactly size * weight,
    rounded by the method of largest remainders. Of equal remainders, the first is rounded up.

    Raises: PlanError if weights are negative, not finite or all zero, or if there are too many
        datasets.
    """
    for dataset, weight in enumerate(weights):
        if not np.isfinite(float(weight)):
            raise PlanError(f"dataset {dataset} has weight {weight}; expected a finite number")
    return Permuted(largest_remainder([Fraction(weight) for weight in weights], size), seed)


class Permuted(ExactBlend):
    """A blend of counts[d] samples of each dataset d, in an order that `seed` determines."""

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        super().__init__(sum(counts))
        if len(counts) > MAX_DATASETS:
            raise PlanError(
                f"found a blend of {len(counts):,} datasets; expected at most {MAX_DATASETS:,}"
            )
        # The permutation gives each sample a position; the positions of a dataset are consecutive
        self._starts = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])
        # The dataset of every 2^_shift-th position, from which `find_owner` searches on
        self._shift = max(0, self.size.bit_length() - _TABLE_BITS)
        tabled = np.arange(0, self.size, 1 << self._shift)
        self._table = (np.searchsorted(self._starts, tabled, side="right") - 1).astype(np.int32)
        key = hash_combine(seed & MASK, self.size)
        self._keys = np.array(
            [hash_combine(key, turn) & 0xFFFFFFFF for turn in range(ROUNDS)], np.uint32
        )
        # The whole permutation as an array if there are at most SMALL samples; empty otherwise
        self._shuffled = np.arange(self.size if self.size <= SMALL else 0)
        shuffle(self._shuffled, key, 0, 0)

    def _compute_next(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        edges = [len(datasets) * part // threads for part in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda span: self._compute(datasets, samples, *span), pairwise(edges)))
        self.step += len(datasets)

    def _compute(self, datasets: Int16s, samples: Int64s, start: int, stop: int) -> None:
        """Fill entries [start, stop) of the arrays; entry 0 is sample `step`."""
        for first in range(start, stop, BLOCK):
            block = slice(first, min(first + BLOCK, stop))
            positions = self._permute(self.step + block.start, self.step + block.stop)
            find_owner(
                positions, self._starts, self._shift, self._table, datasets[block], samples[block]
            )

    def _permute(self, start: int, stop: int) -> Int64s:
        """Return the shuffled positions of samples [start, stop), as int64 [stop - start]."""
        if len(self._shuffled):
            return self._shuffled[start:stop]
        positions = np.empty(stop - start, np.int64)
        keyed_permutation(start, self.size, self._keys, positions)
        return positions
