"""Totals of a stage in which no source gives more than it has left: shares are redistributed, once, by water-filling.

A source whose share is more than its cap gives its cap; what it lacks is divided among the others by their weights, which may
take more of them to their caps. The result does not depend on the sequence of the sources, and
shares are constant through the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from megablend.errors import PlanError
from megablend.plan.allocate import largest_remainder


def capped_totals(weights: Sequence[int | Fraction], caps: Sequence[int | None], total: int) -> list[int]:
    """Divide `total` samples by weight, none of them above its cap.

    Args:
        weights: of each source, [num_sources], 0 or more.
        caps: samples that each source may give at most, [num_sources]; None for no limit.

    Returns: [num_sources] integers that sum to `total`. A source gives its cap where its weight among those below their caps
        would give more; the others are within 1 of their weight's part of the rest.

    Raises: PlanError as largest_remainder does, and where the caps together allow less.
    """
    if (most := longest_stage(weights, caps, redistribute=True)) is not None and total > most:
        raise PlanError(
            f"found {total:,} samples, but the caps of all sources with a share allow {most:,}: ask for at most these"
        )
    totals, free = [0] * len(weights), [source for source, weight in enumerate(weights) if weight > 0]
    left = total
    while full := _over_their_caps(weights, caps, free, left):
        for source, cap in full:
            totals[source] = cap
            left -= cap
        free = [source for source in free if source not in dict(full)]
    if free or left:  # with neither, all are at their caps
        for source, samples in zip(free, largest_remainder([weights[source] for source in free], left), strict=True):
            totals[source] = samples
    return totals


def longest_stage(weights: Sequence[int | Fraction], caps: Sequence[int | None], *, redistribute: bool) -> int | None:
    """The most samples that a stage can have within the caps, [num_sources] each; None where nothing limits it.

    With `redistribute`, others take over from a source at its cap; otherwise each keeps its share.
    """
    capped = [(Fraction(weight), cap) for weight, cap in zip(weights, caps, strict=True) if weight > 0]
    if redistribute:
        limits = [cap for _, cap in capped if cap is not None]
        return sum(limits) if len(limits) == len(capped) else None
    total = sum(weight for weight, _ in capped)
    return min((int(cap * total / weight) for weight, cap in capped if cap is not None), default=None)


def _over_their_caps(
    weights: Sequence[int | Fraction], caps: Sequence[int | None], free: Sequence[int], left: int
) -> list[tuple[int, int]]:
    """(source, cap) of those of `free` whose weight among them would give more of `left` samples than their cap."""
    among = sum(Fraction(weights[source]) for source in free)
    found = [(source, caps[source]) for source in free]
    return [(source, cap) for source, cap in found if cap is not None and weights[source] * left > cap * among]
