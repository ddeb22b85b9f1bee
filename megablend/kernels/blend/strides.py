"""The stride by which the lanes of a cycle advance from slot to slot."""

from __future__ import annotations

from megablend.jit import device, kernel

_CANDIDATES = 256
"""Maximum distance of a candidate from the golden ratio of the slots."""


@kernel
def golden_stride(slots: int, lanes: int) -> int:
    """Return a stride g, coprime with `slots`, such that multiples of g / slots and of g * lanes /
    slots, modulo 1, are spread evenly. `slots` and `lanes` are at least 1.

    A turn moves a lane by g / slots of the cycle, and moves the samples at an edge between two
    sources by g * lanes / slots of a window of `slots` positions. Multiples of a fraction deviate
    from even spread by at most about the sum of its partial quotients (Khinchin), so the candidate
    with the smallest sum for both fractions is taken.
    """
    centre = slots * 987 // 1597  # consecutive Fibonacci numbers: the golden ratio to six digits
    reach = min(_CANDIDATES, max(32, slots // lanes + 1))
    best = 1
    best_cost = -1
    for stride in range(max(1, centre - reach), min(slots, centre + reach) + 1):
        divisor, cost = _partial_quotients(stride, slots)
        cost += _partial_quotients(stride * lanes, slots)[1]
        if divisor == 1 and (best_cost < 0 or cost < best_cost):
            best = stride
            best_cost = cost
    return best


@device
def _partial_quotients(numerator: int, denominator: int) -> tuple[int, int]:
    """Return the greatest common divisor of both numbers, and the sum of the partial quotients of
    their fraction without its integer part."""
    numerator %= denominator
    cost = 0
    while numerator:
        cost += denominator // numerator
        remainder = denominator % numerator
        denominator = numerator
        numerator = remainder
    return denominator, cost
