"""The interface of a blend in Megatron's sense: the dataset of each sample, and the sample's number
within that dataset. `greedy` and `permuted` implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from megablend.arrays import Int16s, Int64s
from megablend.errors import PlanError


class ExactBlend(ABC):
    """A blend whose samples are computed in order, as many at a time as the caller has memory
    for."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Total number of samples."""
        self.step = 0
        """Number of the next sample to compute."""

    def fill(self, datasets: Int16s, samples: Int64s, *, threads: int = 1) -> None:
        """Compute the next n samples.

        Args:
            datasets: int16 [n], filled with the dataset of each sample.
            samples: int64 [n], filled with the sample's number within that dataset.
            threads: number of threads; the result does not depend on it.

        Raises: PlanError if fewer than n samples are left.
        """
        if len(datasets) > self.size - self.step:
            raise PlanError(
                f"{len(datasets):,} samples requested, but the blend has only {self.size - self.step:,} of "
                f"{self.size:,} left"
            )
        self._compute_next(datasets, samples, threads)

    def draw(self, count: int, *, threads: int = 1) -> tuple[Int16s, Int64s]:
        """Compute the next `count` samples as `fill` does, and return them in new arrays: int16
        [count], int64 [count]."""
        datasets = np.empty(count, np.int16)
        samples = np.empty(count, np.int64)
        self.fill(datasets, samples, threads=threads)
        return datasets, samples

    @abstractmethod
    def _compute_next(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        """Fill the arrays and advance `step`."""
