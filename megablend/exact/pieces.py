"""A blend's two arrays, made in order and in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from megablend.errors import PlanError

Int16s = npt.NDArray[np.int16]
Int64s = npt.NDArray[np.int64]


class Pieces(ABC):
    """Which dataset each of a blend's samples comes from, and which of the dataset's it is: memory is that of a piece."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Samples in all."""
        self.step = 0
        """The next one to draw."""

    def fill(self, datasets: Int16s, samples: Int64s, *, threads: int = 1) -> None:
        """Draw the next n samples: for each its dataset, and its number among that dataset's.

        Args:
            datasets: int16 [n], filled.
            samples: int64 [n], filled.
            threads: to share the work; the result does not depend on them.

        Raises: PlanError where fewer than n are left.
        """
        if len(datasets) > self.size - self.step:
            raise PlanError(
                f"{len(datasets):,} samples of a blend that has {self.size - self.step:,} left of {self.size:,}"
            )
        self._fill(datasets, samples, threads)

    def draw(self, count: int, *, threads: int = 1) -> tuple[Int16s, Int64s]:
        """The next `count` samples in new arrays; otherwise as `fill`."""
        datasets, samples = np.empty(count, np.int16), np.empty(count, np.int64)
        self.fill(datasets, samples, threads=threads)
        return datasets, samples

    @abstractmethod
    def _fill(self, datasets: Int16s, samples: Int64s, threads: int) -> None:
        """Fill, and advance `step`."""
