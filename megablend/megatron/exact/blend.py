"""The interface of a blend in Megatron's sense, which determines the dataset of each sample and the
sample's number within that dataset. `greedy` and `permuted` implement this interface."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from megablend.arrays import Int16s, Int64s
from megablend.errors import PlanError


class ExactBlend(ABC):
    """A blend whose samples are computed in order, any number at a time, so that the caller can
    limit the memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Total number of samples."""
        self.step = 0
        """Number of the next sample to compute."""

    def draw(self, count: int, *, threads: int = 1) -> tuple[Int16s, Int64s]:
        """Compute the next `count` samples.

        Args:
            threads: number of threads; the result does not depend on it.

        Returns: the number of the dataset of each sample, int16 [count]; and the number of the
            sample within its dataset, int64 [count].
        Raises: PlanError if fewer samples are left.
        """
        if count > self.size - self.step:
            raise PlanError(
                f"{count:,} samples requested, but the blend has only {self.size - self.step:,} of {self.size:,} left"
            )
        datasets = np.empty(count, np.int16)
        samples = np.empty(count, np.int64)
        self._compute_next(datasets, samples, threads)
        return datasets, samples

    @abstractmethod
    def _compute_next(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        """Compute the next samples into the arrays `datasets` and `samples`, and advance `step`."""
