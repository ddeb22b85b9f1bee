"""The sequential interleaving: all samples of source 0, then those of source 1, and so on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s, Int64s
from megablend.blend.interleavings.base import (
    LocatesMany,
    StageRequest,
    check_places,
    prefix_length,
    sample_numbers,
)


class SequentialPlan(LocatesMany):
    """A plan that reads sources one after another, and skips those without samples. It uses only
    the totals of a request."""

    def __init__(self, stage: StageRequest) -> None:
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(stage.totals)])
        self.num_sources = len(stage.totals)
        self.num_samples = int(self._offsets[-1])

    def locate_many(self, ks: npt.ArrayLike) -> tuple[Int32s, Int64s]:
        """Return the sources and the ordinals of samples `ks`, [n], as int32 [n] and int64 [n].
        Raises: IndexError."""
        numbers = sample_numbers(ks, self.num_samples)
        sources = np.searchsorted(self._offsets, numbers, side="right") - 1
        return sources.astype(np.int32), numbers - self._offsets[sources]

    def counts(self, n: int) -> Int64s:
        """Return how many of the first n samples come from each source: int64 [num_sources]. Raises
        IndexError."""
        reached: Int64s = np.minimum(self._offsets, prefix_length(n, self.num_samples))
        return reached[1:] - reached[:-1]

    def samples_of(self, sources: Int32s, ordinals: Int64s) -> Int64s:
        """Return the numbers of the samples, int64 [n], with these sources and ordinals, int32 [n]
        and int64 [n]. Raises IndexError if one does not exist."""
        sources, ordinals = check_places(sources, ordinals, np.diff(self._offsets))
        ks: Int64s = self._offsets[sources] + ordinals
        return ks

    def nth_sample(self, source: int, n: int) -> int:
        """Return the n-th sample of a source; n is from 1 to the source's number of samples."""
        return int(self._offsets[source]) + n - 1
