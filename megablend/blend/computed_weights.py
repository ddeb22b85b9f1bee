"""Weights computed with powers and quotients: with `decimal`, so that every machine gets the same
digits."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal, localcontext
from fractions import Fraction

DIGITS = 12
"""Significant digits of computed weights, which the ledger stores as exact shares."""
_PRECISION = 50


def compute_weights(weights: Sequence[Fraction], temperature: Fraction | None) -> list[Fraction]:
    """The weights' fractions of their sum, each to the power 1 / temperature (1 where None),
    rounded to 12 digits.

    Args:
        weights: [num_sources], 0 or more, not all 0; 0 stays 0.
    """
    total = sum(weights)
    with localcontext(
        Context(prec=_PRECISION, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX)
    ):
        return [
            _power(weight / total, temperature or Fraction(1)) if weight else Fraction(0)
            for weight in weights
        ]


def _power(number: Fraction, temperature: Fraction) -> Fraction:
    value = Decimal(number.numerator) / Decimal(number.denominator)
    if temperature != 1:
        value = (value.ln() * temperature.denominator / temperature.numerator).exp()
    return Fraction(
        Context(prec=DIGITS, rounding=ROUND_HALF_EVEN, Emin=MIN_EMIN, Emax=MAX_EMAX).create_decimal(
            value
        )
    )
