"""The two arrays of a blend, computed in order, piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from megablend.arrays import Int16s, Int64s
from megablend.errors import PlanError


class Pieces(ABC):
    """The dataset of each sample of a blend, and the sample's number within it, with the memory of one piece at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Total number of samples."""
        self.step = 0
        """The next sample to compute."""

    def fill(self, datasets: Int16s, samples: Int64s, *, threads: int = 1) -> None:
        """Compute the next n samples: the dataset of each, and the sample's number within that dataset.

        Args:
            datasets: int16 [n], filled.
            samples: int64 [n], filled.
            threads: number of threads; the result does not depend on it.

        Raises: PlanError where fewer than n samples are left.
        """
        if len(datasets) > self.size - self.step:
            raise PlanError(
                f"{len(datasets):,} samples requested of a blend that has {self.size - self.step:,} of {self.size:,} left"
            )
        self._fill(datasets, samples, threads)

    def draw(self, count: int, *, threads: int = 1) -> tuple[Int16s, Int64s]:
        """The next `count` samples in new arrays; otherwise like `fill`."""
        datasets, samples = np.empty(count, np.int16), np.empty(count, np.int64)
        self.fill(datasets, samples, threads=threads)
        return datasets, samples

    @abstractmethod
    def _fill(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        """Fill the arrays and advance `step`."""
