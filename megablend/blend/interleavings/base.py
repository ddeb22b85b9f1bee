"""The interface of interleavings: functions from a sample number to (source, ordinal), and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s, Int64s
from megablend.errors import PlanError

MAX_SAMPLES = (1 << 50) - 1
"""Maximum number of samples of a plan: the limit of its exact arithmetic in float64 and int64."""
MAX_TOKENS = (1 << 63) - 1
"""Maximum number of tokens of a source that a plan can count, over all epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """The input of an interleaving. Each interleaving uses the fields that it needs, and always
    gives each source exactly its total."""

    totals: Int64s
    """Number of samples of each source, int64 [num_sources]; the sum is at least 1."""
    first_sample: int = 0
    """Number of the stage's first sample in the run. It is also a seed of the order, so that no
    stage repeats the order of another stage."""
    first_tokens: Int64s
    """The first token of each source's first sample of the stage, counted over all its epochs:
    int64 [num_sources]."""
    seed: int = 0
    lanes: int = 1
    shuffle_window: int = 1
    """Number of samples of each lane in a cycle."""
    cycles: Int64s
    """The number of cycles that share each run of a source's ordinals, int64 [num_sources]."""
    epoch_tokens: Int64s | None = None
    """Number of tokens per epoch of each source, int64 [num_sources]; None if runs of ordinals need
    not end at epoch ends."""
    sample_tokens: int = 1
    """Number of tokens from the start of one sample to the start of the next."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the stage."""
        return int(self.totals.sum())


class Plan(Protocol):
    """A pure function from sample number to (source, ordinal). Immutable; safe to share between
    threads and to pickle.

    The plan of a stage counts samples and ordinals from the start of the stage; the plan of a run,
    from the start of the run.
    """

    num_samples: int
    num_sources: int

    def locate(self, k: int) -> tuple[int, int]:
        """Return the source and the ordinal of sample k. Raises IndexError outside [0,
        num_samples)."""
        ...

    def locate_many(self, ks: npt.ArrayLike) -> tuple[Int32s, Int64s]:
        """Return the sources and the ordinals of samples `ks`, [n], as int32 [n] and int64 [n].
        Raises: IndexError."""
        ...

    def counts(self, n: int) -> Int64s:
        """Return how many of the first n samples come from each source: int64 [num_sources]. Raises
        IndexError."""
        ...

    def samples_of(self, sources: Int32s, ordinals: Int64s) -> Int64s:
        """Return the numbers of the samples with these sources and ordinals; the inverse of
        `locate_many`.

        Args:
            sources, ordinals: int32 [n] and int64 [n].

        Returns: int64 [n].
        Raises: IndexError for a source or ordinal that the plan does not have.
        """
        ...

    def nth_sample(self, source: int, n: int) -> int:
        """Return the n-th sample of a source in the order of samples, whatever its ordinal; n is
        from 1 to the source's number of samples."""
        ...


def sample_numbers(ks: npt.ArrayLike, num_samples: int) -> Int64s:
    """Check sample numbers and return them as int64 [n]. Raises IndexError outside
    [0, num_samples), TypeError if they are not integers."""
    numbers = np.asarray(ks)
    # numpy has objects for integers that are too large for 64 bits
    if numbers.dtype.kind == "O" and all(isinstance(k, int) for k in numbers.flat):
        farthest = max(numbers.flat, key=abs)
        # Python refuses to write integers of more than 4,300 digits
        named = farthest if abs(farthest) < 10**100 else "number of more than 100 digits"
        raise IndexError(f"sample {named} is out of range: the plan has {num_samples} samples")
    if numbers.dtype.kind not in "iu" and numbers.size:
        raise TypeError(f"sample numbers must be integers, found {numbers.dtype}")
    outside = (numbers < 0) | (numbers >= num_samples)
    if outside.any():
        raise IndexError(
            f"sample {numbers[outside].ravel()[0]} is out of range: the plan has {num_samples} samples"
        )
    return np.ascontiguousarray(numbers, np.int64)


def check_places(
    sources: npt.ArrayLike, ordinals: npt.ArrayLike, totals: Int64s
) -> tuple[Int32s, Int64s]:
    """Check sources and ordinals, and return them as int32 [n] and int64 [n].

    Args:
        totals: int64 [num_sources], number of ordinals of each source.

    Raises: IndexError if a source or an ordinal does not exist.
    """
    source_array = np.ascontiguousarray(sources, np.int32)
    ordinal_array = np.ascontiguousarray(ordinals, np.int64)
    has_source = (source_array >= 0) & (source_array < len(totals))
    outside = ~has_source | (ordinal_array < 0)
    outside[has_source] |= ordinal_array[has_source] >= totals[source_array[has_source]]
    if outside.any():
        first = int(np.argmax(outside))
        raise IndexError(
            f"the plan has no sample with source {source_array[first]} and ordinal {ordinal_array[first]}"
        )
    return source_array, ordinal_array


def prefix_length(n: int, num_samples: int) -> int:
    """Return `n` unchanged. Raises: IndexError outside [0, num_samples]."""
    if not 0 <= n <= num_samples:
        raise IndexError(f"the first {n} samples were requested, but the plan has {num_samples}")
    return n


class LocatesMany:
    """A mix-in that implements a plan's `locate` through its `locate_many`."""

    def locate(self, k: int) -> tuple[int, int]:
        """See Plan.locate."""
        sources, ordinals = self.locate_many([k])
        return int(sources[0]), int(ordinals[0])

    def locate_many(self, ks: npt.ArrayLike) -> tuple[Int32s, Int64s]:
        """See Plan.locate_many."""
        raise NotImplementedError


def check_tokens(
    samples: Sequence[int],
    first_tokens: Sequence[int],
    epoch_tokens: Sequence[int],
    sample_tokens: int,
) -> None:
    """Check that the tokens of each source can be counted in 64 bits. Raises: PlanError.

    Args:
        samples: [num_sources], number of samples of each source in a stage.
        first_tokens: [num_sources], first token of each source's first sample, counted over all
            epochs.
        epoch_tokens: [num_sources], number of tokens per epoch of each source.
        sample_tokens: number of tokens from the start of one sample to the start of the next.
    """
    if sample_tokens < 1:
        raise PlanError(f"samples are {sample_tokens} tokens apart; expected at least 1")
    for source, (tokens, first, read) in enumerate(
        zip(epoch_tokens, first_tokens, samples, strict=True)
    ):
        if tokens < (read > 0):
            raise PlanError(f"source {source} has epochs of {tokens} tokens; expected at least 1")
        # Kernels estimate positions; they overshoot the end by less than this margin
        if first + (read + 4) * sample_tokens + tokens > MAX_TOKENS:
            raise PlanError(
                f"source {source} gives {read} samples of {sample_tokens} tokens from token {first} on, in epochs of {tokens} "
                f"tokens, which are too many; a plan can count at most {MAX_TOKENS} tokens of a source, including one epoch "
                "after the last sample"
            )
