"""Divide samples among sources: exact integers from exact shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from megablend.errors import PlanError

BLOCKS_PER_RUN = 20
"""Number of blocks that a lane's run of ordinals should span. A run that spans r blocks reads about
r + 1 of them, so with r = 20 about 5 % of the reads are duplicate."""
MAX_CYCLES_PER_RUN = 32
"""Maximum number of cycles that share a run of ordinals; with more, locating a sample takes
longer."""


def largest_remainder(weights: Sequence[int | Fraction], total: int) -> list[int]:
    """Divide `total` samples among sources by weight: each source gets its exact share rounded
    down, and the sources with the largest remainders get one more; ties go to the first sources.

    Returns: integers that sum to `total`, each within 1 of weight * total / sum of weights.

    Raises: PlanError if a weight is negative, all weights are 0, or the total is negative.
    """
    return _divide(_to_integers(weights), total)


def stage_totals(weights: Sequence[int | Fraction], ends: Sequence[int]) -> list[list[int]]:
    """Return the number of samples of each source in each stage of one blend:
    [num_stages][num_sources]. The stages end at `ends`, in samples from the blend's start.

    Each stage corrects the rounding of earlier stages: it divides its samples in proportion to the
    residuals weight * end - samples so far, with negative residuals taken as 0. Appending ends does
    not change the totals of earlier stages.

    Raises: PlanError if `ends` are not positive and strictly increasing; see also
        `largest_remainder`.
    """
    wholes = _to_integers(weights)
    scale = sum(wholes)
    start = 0
    so_far = [0] * len(wholes)
    totals = []
    for end in ends:
        if end <= start:
            raise PlanError(
                f"a stage ends at sample {end}, but begins at sample {start}; the end must be a later sample"
            )
        residuals = [
            max(0, whole * end - before * scale)
            for whole, before in zip(wholes, so_far, strict=True)
        ]
        stage = _divide(residuals, end - start)
        so_far = [before + added for before, added in zip(so_far, stage, strict=True)]
        totals.append(stage)
        start = end
    return totals


def divide_residuals(due: Sequence[Fraction], given: Sequence[int], total: int) -> list[int]:
    """Divide `total` samples among sources in proportion to their residuals. A residual is the
    number of samples that are `due` minus the number already `given`, but at least 0."""
    residuals = [
        max(Fraction(0), target - before) for target, before in zip(due, given, strict=True)
    ]
    return _divide(_to_integers(residuals), total)


def divide_drain(weights: Sequence[Fraction], left: Sequence[int], total: int) -> list[int]:
    """Divide the `total` samples of a drain among sources by weight, such that each source gets at
    least the number of samples that it has `left` to finish.

    If a source has more samples left than its share, the excess is taken from the other sources, in
    proportion to their weights.

    Raises: PlanError if `total` is less than the sum of `left`, or is greater and all weights are
    0.
    """
    free = {source for source, weight in enumerate(weights) if weight > 0}
    if total < sum(left) or (total > sum(left) and not free):
        at_least = "at least " if free else ""
        raise PlanError(
            f"drain: found {total:,} samples, expected {at_least}{sum(left):,}, the number that the lanes have begun "
            "to read"
        )
    while free:
        rest = total - sum(num_left for source, num_left in enumerate(left) if source not in free)
        shares = largest_remainder(
            [weight if source in free else 0 for source, weight in enumerate(weights)], rest
        )
        below = {source for source in free if shares[source] < left[source]}
        if not below:
            return [
                shares[source] if source in free else num_left
                for source, num_left in enumerate(left)
            ]
        # These get exactly what they have left; the others divide the rest
        free = free - below
    return list(left)


def drain_length(weights: Sequence[Fraction], left: Sequence[int], start: int, unit: int) -> int:
    """Return the length in samples of the shortest drain that begins at sample `start`, ends at a
    multiple of `unit`, and is long enough for the share of each source to cover the samples that
    the source has `left`; see `divide_drain`. As far as `unit` allows, the length is at most twice
    the number of samples that all sources have left: a source with a small share could otherwise
    make a drain arbitrarily long."""
    total_left = sum(left)
    limit = 2 * total_left
    scale = sum(weights)
    pairs = list(zip(weights, left, strict=True))
    # Sources without a share get what they have left, in addition to the shares of the others
    unshared = sum(num_left for weight, num_left in pairs if weight == 0)
    lengths = [math.ceil(num_left * scale / weight) for weight, num_left in pairs if weight > 0]
    length = min(unshared + max(lengths, default=0), limit)
    length += -(start + length) % unit
    # If rounding up passed the limit, use the previous multiple, provided that it still has room
    # for what is left
    if limit < length and length - unit >= total_left > 0:
        return length - unit
    return length


def cycles_per_run(
    block_tokens: int | Fraction, share: int | Fraction, sample_tokens: int, slots: int
) -> int:
    """Choose how many cycles share each run of a source's ordinals, so that a lane's run spans
    about BLOCKS_PER_RUN blocks.

    Args:
        block_tokens: mean number of tokens of the source's blocks.
        share: the source's fraction of the blend's samples, 0 to 1.
        sample_tokens: number of tokens from the start of one sample to the start of the next.
        slots: number of samples of each lane in a cycle.

    Returns: an integer from 1 to MAX_CYCLES_PER_RUN; 1 for a source without a share.
    """
    # Tokens of the source that a lane reads in one cycle, times the share's denominator
    lane_tokens = share.numerator * slots * sample_tokens
    if lane_tokens <= 0:
        return 1
    # Tokens of a run, times the denominators of the share and of block_tokens
    run_tokens = BLOCKS_PER_RUN * block_tokens.numerator * share.denominator
    return min(
        MAX_CYCLES_PER_RUN, max(1, -(-run_tokens // (block_tokens.denominator * lane_tokens)))
    )


def _to_integers(weights: Sequence[int | Fraction]) -> list[int]:
    """Return the weights times their common denominator. Raises: PlanError if one is negative, or
    all are 0."""
    for source, weight in enumerate(weights):
        if weight < 0:
            raise PlanError(f"source {source} has weight {weight}; expected 0 or more")
    if not any(weights):
        raise PlanError("all weights are 0; expected at least one above 0")
    scale = math.lcm(*(weight.denominator for weight in weights))
    return [weight.numerator * (scale // weight.denominator) for weight in weights]


def _divide(wholes: Sequence[int], total: int) -> list[int]:
    """Divide `total` samples as `largest_remainder` does, given integer weights."""
    if total < 0:
        raise PlanError(f"cannot divide {total} samples; expected 0 or more")
    scale = sum(wholes)
    totals = list[int]()
    negated = list[int]()  # the remainders, so that the largest are the first
    for whole in wholes:
        floor, remainder = divmod(whole * total, scale)
        totals.append(floor)
        negated.append(-remainder)
    by_remainder = sorted(range(len(wholes)), key=negated.__getitem__)
    for source in by_remainder[: total - sum(totals)]:
        totals[source] += 1
    return totals
