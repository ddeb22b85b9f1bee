"""Totals of a stage in which no source exceeds its cap: the excess is redistributed by water-filling.

A source whose share exceeds its cap gives exactly its cap; the difference is divided among the other sources by their weights,
which may bring more of them to their caps. The result does not depend on the sequence of the sources, and shares are constant
throughout the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from megablend.errors import PlanError
from megablend.plan.allocate import largest_remainder


def capped_totals(weights: Sequence[int | Fraction], caps: Sequence[int | None], total: int) -> list[int]:
    """Divide `total` samples by weight, without exceeding any source's cap.

    Args:
        weights: [num_sources], 0 or more.
        caps: the most samples that each source may give, [num_sources]; None for no limit.

    Returns: [num_sources] integers that sum to `total`. A source gives its cap where its weight, relative to the sources below
        their caps, would give more; the others are within 1 of their share of the rest.

    Raises: PlanError as largest_remainder does, and where the caps together allow fewer samples.
    """
    if (most := longest_stage(weights, caps, redistribute=True)) is not None and total > most:
        raise PlanError(
            f"{total:,} samples requested, but the caps of all sources with a share allow {most:,}: request at most that many"
        )
    totals, free = [0] * len(weights), [source for source, weight in enumerate(weights) if weight > 0]
    left = total
    while full := _find_over_caps(weights, caps, free, left):
        for source, cap in full:
            totals[source] = cap
            left -= cap
        free = [source for source in free if source not in dict(full)]
    if free or left:  # otherwise all sources are at their caps
        for source, samples in zip(free, largest_remainder([weights[source] for source in free], left), strict=True):
            totals[source] = samples
    return totals


def longest_stage(weights: Sequence[int | Fraction], caps: Sequence[int | None], *, redistribute: bool) -> int | None:
    """The most samples that a stage can have within the caps, [num_sources] each; None where no cap limits it.

    With `redistribute`, other sources replace one that reached its cap; otherwise each keeps its share.
    """
    capped = [(Fraction(weight), cap) for weight, cap in zip(weights, caps, strict=True) if weight > 0]
    if redistribute:
        limits = [cap for _, cap in capped if cap is not None]
        return sum(limits) if len(limits) == len(capped) else None
    total = sum(weight for weight, _ in capped)
    return min((int(cap * total / weight) for weight, cap in capped if cap is not None), default=None)


def _find_over_caps(
    weights: Sequence[int | Fraction], caps: Sequence[int | None], free: Sequence[int], left: int
) -> list[tuple[int, int]]:
    """(source, cap) of the sources in `free` whose share of `left` samples, by weight among `free`, exceeds their cap."""
    total = sum(Fraction(weights[source]) for source in free)
    capped = [(source, caps[source]) for source in free]
    return [(source, cap) for source, cap in capped if cap is not None and weights[source] * left > cap * total]
