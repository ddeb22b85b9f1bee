"""Shares of a stage in which no source exceeds its cap: the excess is redistributed by
water-filling.

A source whose share exceeds its cap gives exactly its cap; the difference is divided among the
other sources by their weights, which may bring more of them to their caps. The result does not
depend on the sequence of the sources, and shares are constant throughout the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from megablend.errors import PlanError

Weights = Sequence[int | Fraction]
"""The weight of each source, [num_sources], 0 or more."""
Caps = Sequence[int | None]
"""The maximum number of samples that each source may give in the stage, [num_sources]; None for no
limit."""


def capped_shares(weights: Weights, caps: Caps, total: int) -> list[Fraction]:
    """Return the shares that are nearest to the weights such that no source exceeds its cap in a
    stage of `total` samples.

    Args:
        weights: not all 0.

    Returns: [num_sources], sum 1: cap / total for a source whose weight, relative to the sources
        below their caps, would give more; the others share the rest by weight.
        `largest_remainder` of the shares gives each source at most its cap.

    Raises: PlanError if the caps together allow fewer than `total` samples, or `total` is not
        above 0.
    """
    if total < 1:
        raise PlanError(f"cannot divide {total} samples; expected more than 0")
    longest = longest_stage(weights, caps, redistribute=True)
    if longest is not None and total > longest:
        raise PlanError(
            f"{total:,} samples requested, but the caps of the sources that have a share allow only {longest:,}; request "
            "fewer, or raise a cap"
        )
    shares = [Fraction(0)] * len(weights)
    free = [source for source, weight in enumerate(weights) if weight > 0]
    left = total
    over_caps = _find_over_caps(weights, caps, free, left)
    while over_caps:
        for source, cap in over_caps.items():
            shares[source] = Fraction(cap, total)
            left -= cap
        free = [source for source in free if source not in over_caps]
        over_caps = _find_over_caps(weights, caps, free, left)
    scale = total * sum(Fraction(weights[source]) for source in free)
    for source in free:
        shares[source] = Fraction(weights[source]) * left / scale
    return shares


def longest_stage(weights: Weights, caps: Caps, *, redistribute: bool) -> int | None:
    """Return the largest number of samples that a stage can have within the caps; None if no cap
    limits the number.

    Args:
        redistribute: whether other sources replace a source that has reached its cap; otherwise
            each source keeps its share.
    """
    capped = [
        (Fraction(weight), cap) for weight, cap in zip(weights, caps, strict=True) if weight > 0
    ]
    if redistribute:
        limits = [cap for _, cap in capped if cap is not None]
        return sum(limits) if len(limits) == len(capped) else None
    total = sum(weight for weight, _ in capped)
    return min(
        (int(cap * total / weight) for weight, cap in capped if cap is not None), default=None
    )


def _find_over_caps(weights: Weights, caps: Caps, free: Sequence[int], left: int) -> dict[int, int]:
    """Find the sources in `free` whose share of `left` samples, by weight among `free`, exceeds
    their cap. Returns the cap of each such source, by its number."""
    total = sum(Fraction(weights[source]) for source in free)
    capped = [(source, caps[source]) for source in free]
    return {
        source: cap
        for source, cap in capped
        if cap is not None and weights[source] * left > cap * total
    }
