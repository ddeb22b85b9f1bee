"""A stage's tree (megablend.kernels.blend.tree): the totals of its sources, which gives the counts
of any prefix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.kernels.blend.tree import all_counts, huffman


class Tree(NamedTuple):
    """A stage's sources with their totals, as arrays; sources without samples are left out."""

    left_leaves: npt.NDArray[np.int32]
    """int32 [num_leaves], by inner node; the last entry is unused."""
    left_samples: npt.NDArray[np.int64]
    """int64 [num_leaves], by inner node; the last entry is unused."""
    sources: npt.NDArray[np.int32]
    """int32 [num_leaves], by rank."""
    samples: npt.NDArray[np.int64]
    """int64 [num_leaves], by rank: the totals."""

    def counts(self, n: int) -> npt.NDArray[np.int64]:
        """How many of the first n samples each leaf has: int64 [num_leaves], by rank; 0 <= n <= sum
        of the totals."""
        counts = np.empty(len(self.sources), np.int64)
        all_counts(self.left_leaves, self.left_samples, int(self.samples.sum()), n, counts)
        return counts


def build_tree(totals: npt.NDArray[np.int64]) -> Tree:
    """Build the tree of a stage: totals int64 [D], not negative, at least one positive, sum below
    2^50. O(D log D)."""
    order = np.argsort(totals, kind="stable")
    order = order[totals[order] > 0]
    left_leaves = np.zeros(len(order), np.int32)
    left_samples = np.zeros(len(order), np.int64)
    leaves = np.empty(len(order), np.int32)
    huffman(totals[order], left_leaves, left_samples, leaves)
    sources = order[leaves]
    return Tree(left_leaves, left_samples, sources.astype(np.int32), totals[sources])
