"""How shuffled an order is, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def distance_moved(places: Int64s) -> float:
    """By how far samples lie from where they were, on average, as a share of the corpus; 1/3 where all is random.

    Args:
        places: int64 [num_samples], each sample's first token.
    """
    ranks = np.argsort(np.argsort(places, kind="stable"), kind="stable")
    return float(np.abs(ranks - np.arange(len(ranks))).mean() / len(ranks))


def neighbours(labels: Int64s, batch: int) -> float:
    """How many others of its batch share a sample's label, on average; a last, short batch is left out."""
    grouped = np.sort(labels[: len(labels) // batch * batch].reshape(-1, batch), axis=1)
    rows = np.repeat(np.arange(len(grouped)), batch)
    _, counts = np.unique(np.stack([rows, grouped.ravel()]), axis=1, return_counts=True)
    return float((counts * (counts - 1)).sum() / grouped.size)


def autocorrelation(labels: Int64s, ranges: Sequence[tuple[int, int]]) -> list[float]:
    """How much more often samples share a label than by chance, 1 where they always do: the mean over lags [start, stop).

    Single lags would mislead: what deals samples out by turns has peaks at multiples of its number of turns.

    Raises: ValueError where a range begins at less than 1 or ends above the number of samples.
    """
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    chance = float((shares**2).sum())
    if min(start for start, _ in ranges) < 1 or max(stop for _, stop in ranges) > len(labels):
        raise ValueError(
            f"lags {ranges} of {len(labels)} samples: expected from 1 to {len(labels) - 1}"
        )
    if chance == 1:
        return [0.0] * len(ranges)
    means = [
        np.mean([(labels[lag:] == labels[:-lag]).mean() for lag in range(*limits)])
        for limits in ranges
    ]
    return [float((mean - chance) / (1 - chance)) for mean in means]
