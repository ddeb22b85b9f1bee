"""What is left of the periods that the end of a cycle cuts:
the next ordinals of each source after an amendment.

A source's *next* ordinals after the cut are numbered on from those it has read. The first of them
are the tails, which stand for the ordinals of the cut period that its lanes had not read, lane by
lane; those after the period stand for themselves. So next ordinals stand for the ordinals that were
not read, in ascending order.
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
    """int64 [num_sources], first ordinal of the cut period."""
    read: Int64s
    """int64 [num_sources], how many ordinals were read; the first of the next ordinals."""
    stop: Int64s
    """int64 [num_sources], the end of the cut period; as `read` where nothing is left."""
    ranks: Int64s
    """int64 [num_sources], ranks in `periods` and `parts`."""
    lanes: int
    cut: int
    """Number of the first cycle that is not read."""
    periods: Int64s
    parts: Int64s
    """The cut periods; see megablend.kernels.blend.tails."""

    @property
    def left(self) -> Int64s:
        """How many ordinals are left of each source's period: int64 [num_sources]."""
        left: Int64s = self.stop - self.read
        return left

    def resolve(self, sources: Int32s, ordinals: Int64s) -> Int64s:
        """The ordinals that next ordinals stand for: int64 [n]."""
        rows = np.flatnonzero((ordinals >= self.read[sources]) & (ordinals < self.stop[sources]))
        found: Int64s = ordinals.copy()
        if not len(rows):
            return found
        chosen = sources[rows]
        inside = np.empty(len(rows), np.int64)
        places = ordinals[rows] - self.read[chosen]
        tail_ordinals(
            self.ranks[chosen], places, self.lanes, self.cut, self.periods, self.parts, inside
        )
        found[rows] = inside
        return found

    def find_next(self, sources: Int32s, ordinals: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """The next ordinals that stand for `ordinals` int64 [n], or for the first ones after them
        that are left: int64 [n]; and whether each ordinal is itself left: bool [n]."""
        found = np.maximum(ordinals, self.read[sources])
        left = ordinals >= self.stop[sources]
        rows = np.flatnonzero((ordinals >= self.first[sources]) & ~left)
        if not len(rows):
            return found, left
        chosen = sources[rows]
        counts = np.empty(len(rows), np.int64)
        is_left = np.empty(len(rows), np.int64)
        count_tails(
            self.ranks[chosen],
            ordinals[rows],
            self.lanes,
            self.cut,
            self.periods,
            self.parts,
            counts,
            is_left,
        )
        found[rows] = self.read[chosen] + counts
        left[rows] = is_left > 0
        return found, left
