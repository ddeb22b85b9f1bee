"""The seam of interleavings: from sample number to (source, ordinal) and back to counts."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

MAX_SAMPLES = (1 << 50) - 1
"""Samples of a plan: what the exact arithmetic in doubles and 64 bits carries."""


class Plan(Protocol):
    """A pure function from sample number to (source, ordinal). Immutable, safe to share between threads, to pickle."""

    num_samples: int
    num_sources: int

    def locate(self, k: int) -> tuple[int, int]:
        """(source, ordinal over all stages and epochs) of sample k. Raises IndexError outside [0, num_samples)."""
        ...

    def locate_many(self, ks: npt.ArrayLike) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Sources int32 [n] and ordinals int64 [n] of samples ks [n]. Raises IndexError."""
        ...

    def counts(self, n: int) -> npt.NDArray[np.int64]:
        """How many of the first n samples are of each source: int64 [num_sources]. Raises IndexError."""
        ...

    def first_sample_from(self, source: int, ordinal: int) -> int | None:
        """The first sample that is one of a source's ordinals from `ordinal` on; None where the plan has none of these."""
        ...

    def samples_of(self, sources: npt.NDArray[np.int32], ordinals: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples of (sources, ordinals), int32 and int64 [n]: int64 [n]; -1 where the plan has none."""
        ...


def sample_numbers(ks: npt.ArrayLike, num_samples: int) -> npt.NDArray[np.int64]:
    """Sample numbers as int64 [n]. Raises IndexError outside [0, num_samples), TypeError where they are not integers."""
    given = np.asarray(ks)
    if given.dtype.kind == "O" and all(isinstance(k, int) for k in given.flat):  # too large for 64 bits
        raise IndexError(f"sample {max(given.flat, key=abs)} is outside of the plan's {num_samples} samples")
    if given.dtype.kind not in "iu" and given.size:
        raise TypeError(f"sample numbers must be integers, not {given.dtype}")
    outside = (given < 0) | (given >= num_samples)
    if outside.any():
        raise IndexError(f"sample {given[outside].ravel()[0]} is outside of the plan's {num_samples} samples")
    return np.ascontiguousarray(given, np.int64)


def prefix_length(n: int, num_samples: int) -> int:
    """`n` as it is. Raises IndexError outside [0, num_samples]."""
    if not 0 <= n <= num_samples:
        raise IndexError(f"the first {n} samples of a plan of {num_samples} samples do not exist")
    return n
