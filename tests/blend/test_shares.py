"""Weights by size and temperature: twelve digits, the same on every machine, as floats say them to within rounding."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.blend.shares import compute_weights
from tests.examples import examples


@examples(100)
@given(
    st.lists(st.integers(1, 10**13), min_size=1, max_size=20),
    st.sampled_from(["0.5", "1", "2", "10/3", "100"]),
)
def test_weights_agree_with_floats(sizes: list[int], temperature: str) -> None:
    made = compute_weights([Fraction(n) for n in sizes], Fraction(temperature))
    for weight, size in zip(made, sizes, strict=True):
        assert float(weight) == pytest.approx(
            (size / sum(sizes)) ** (1 / float(Fraction(temperature))), rel=1e-11
        )
        assert len(str(weight.numerator * 10**40 // weight.denominator).rstrip("0")) <= 12


def test_digits_are_what_they_were() -> None:
    """Ledgers keep these numbers: they must not change with a release."""
    sizes = [Fraction(n) for n in (1_234_567_890_123, 98_765, 7, 0)]
    by_temperature = ["0.999999975974", "0.00739256602550", "0.000419466812634", "0"]
    assert compute_weights(sizes, Fraction("3.33")) == [Fraction(x) for x in by_temperature]
    by_size = ["0.999999919995", "7.99996443196E-8", "5.66999959740E-12", "0"]
    assert compute_weights(sizes, None) == [Fraction(x) for x in by_size]


def test_weights_far_apart_stay_above_zero() -> None:
    tiny, large = compute_weights([Fraction(1, 10**100), Fraction(10**100)], Fraction(1, 10))
    assert 0 < tiny < large
    assert large == 1
