"""Tails: the ordinals of sources' periods that have not been read when an amendment cuts a stage at
the end of a cycle.

After the cut, the remaining samples of a source are counted by *next* ordinals, which begin at the
number of ordinals that were read. The first next ordinals, the tails, stand for the ordinals of the
cut period that lanes have not read, lane by lane. Those beyond the period stand for themselves. So
next ordinals stand for the ordinals that were not read, in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s, Int64s
from megablend.kernels.blend.tails import count_tails, tail_ordinals


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tails:
    """The tails of a stage; ordinals are counted from the stage's start."""

    first: Int64s
    """The first ordinal of each source's cut period, int64 [num_sources]."""
    read: Int64s
    """The number of ordinals that were read, which is the first next ordinal: int64
    [num_sources]."""
    stop: Int64s
    """The end of the cut period, int64 [num_sources]; equal to `read` if nothing is left."""
    ranks: Int64s
    """The rank of each source in `periods` and `parts`, int64 [num_sources]."""
    lanes: int
    cut: int
    """Number of the first cycle that is not read."""
    periods: Int64s
    """The cut periods; see megablend.kernels.blend.tails."""
    parts: Int64s
    """The parts of the cut periods; see megablend.kernels.blend.tails."""

    def resolve(self, sources: Int32s, ordinals: Int64s) -> Int64s:
        """Return the ordinals that the given next ordinals stand for. Both are int64 [n]."""
        rows = np.flatnonzero((ordinals >= self.read[sources]) & (ordinals < self.stop[sources]))
        resolved: Int64s = ordinals.copy()
        if not len(rows):
            return resolved
        tail_sources = sources[rows]
        tails = np.empty(len(rows), np.int64)
        tail_positions = ordinals[rows] - self.read[tail_sources]
        tail_ordinals(
            self.ranks[tail_sources],
            tail_positions,
            self.lanes,
            self.cut,
            self.periods,
            self.parts,
            tails,
        )
        resolved[rows] = tails
        return resolved

    def find_next(self, sources: Int32s, ordinals: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Find the next ordinals that stand for `ordinals`, int64 [n]; the inverse of `resolve`.

        Returns: the next ordinal that stands for each ordinal, or, if the ordinal was read, for the
            first unread ordinal after it, int64 [n]; and whether each ordinal is unread, bool [n].
        """
        next_ordinals = np.maximum(ordinals, self.read[sources])
        left = ordinals >= self.stop[sources]
        rows = np.flatnonzero((ordinals >= self.first[sources]) & ~left)
        if not len(rows):
            return next_ordinals, left
        cut_sources = sources[rows]
        counts = np.empty(len(rows), np.int64)
        is_left = np.empty(len(rows), np.int64)
        count_tails(
            self.ranks[cut_sources],
            ordinals[rows],
            self.lanes,
            self.cut,
            self.periods,
            self.parts,
            counts,
            is_left,
        )
        next_ordinals[rows] = self.read[cut_sources] + counts
        left[rows] = is_left > 0
        return next_ordinals, left
