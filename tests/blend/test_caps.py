"""Caps: water-filling equals a twin that pours sample by sample, and no source gives more than it has."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.blend.allocate import largest_remainder
from megablend.blend.caps import capped_shares, longest_stage
from megablend.errors import PlanError
from tests.examples import examples

BLENDS = st.lists(
    st.tuples(st.integers(0, 9), st.none() | st.integers(0, 30)), min_size=1, max_size=6
).filter(lambda blend: any(weight for weight, _ in blend))


def water_level(weights: list[int], caps: list[int | None], total: int) -> list[Fraction]:
    """Amounts min(cap, weight * level), the level raised from one cap to the next until they sum to the total."""
    levels = sorted(
        {Fraction(0)}
        | {Fraction(cap, w) for w, cap in zip(weights, caps, strict=True) if w and cap is not None}
    )

    def amounts(level: Fraction) -> list[Fraction]:
        given = [w * level for w in weights]
        return [
            amount if cap is None else min(amount, Fraction(cap))
            for amount, cap in zip(given, caps, strict=True)
        ]

    below = max(level for level in levels if sum(amounts(level)) <= total)
    rising = [
        w if cap is None or w * below < cap else 0 for w, cap in zip(weights, caps, strict=True)
    ]
    rest = total - sum(amounts(below), Fraction(0))
    return amounts(below if not sum(rising) else below + rest / sum(rising))


def capped_totals(weights: Sequence[int], caps: Sequence[int | None], total: int) -> list[int]:
    """Samples of each source, as the plan of a stage with these caps counts them."""
    return largest_remainder(capped_shares(weights, caps, total) if total > 0 else weights, total)


@examples(300)
@given(BLENDS, st.integers(0, 150))
def test_totals_are_within_one_of_the_water_level_and_never_above_a_cap(
    blend: list[tuple[int, int | None]], total: int
) -> None:
    weights = [weight for weight, _ in blend]
    caps = [cap for _, cap in blend]
    most = longest_stage(weights, caps, redistribute=True)
    if most is not None and total > most:
        with pytest.raises(
            PlanError,
            match=f"^{total} samples requested, but the caps .* allow only {most}; request fewer",
        ):
            capped_totals(weights, caps, total)
        return
    totals = capped_totals(weights, caps, total)
    assert sum(totals) == total
    for found, amount, cap, weight in zip(
        totals, water_level(weights, caps, total), caps, weights, strict=True
    ):
        assert abs(found - amount) < 1
        assert cap is None or found <= cap
        assert weight > 0 or found == 0


def test_without_caps_it_is_the_largest_remainder() -> None:
    assert capped_totals([5, 3, 2], [None] * 3, 17) == largest_remainder([5, 3, 2], 17)


def test_what_one_source_lacks_takes_another_to_its_cap() -> None:
    assert capped_totals([6, 3, 1], [10, 20, None], 100) == [10, 20, 70]
    assert capped_totals([6, 3, 1], [10, 20, 70], 100) == [10, 20, 70]


@pytest.mark.parametrize(
    ("weights", "caps", "kept", "redistributed"),
    [
        ([1, 1], [None, None], None, None),
        ([3, 1], [30, None], 40, None),
        ([3, 1], [30, 5], 20, 35),
        ([Fraction(1, 3), Fraction(2, 3), 0], [7, 100, 1], 21, 107),
    ],
)
def test_the_longest_stage(
    weights: list[int], caps: list[int | None], kept: int | None, redistributed: int | None
) -> None:
    assert longest_stage(weights, caps, redistribute=False) == kept
    assert longest_stage(weights, caps, redistribute=True) == redistributed
    if kept is not None:
        for total, fits in ((kept, True), (2 * kept, False)):
            asked = largest_remainder(weights, total)
            assert all(cap is None or n <= cap for n, cap in zip(asked, caps, strict=True)) == fits


@examples(200)
@given(BLENDS, st.integers(1, 150))
def test_shares_are_the_water_level_itself(blend: list[tuple[int, int | None]], total: int) -> None:
    weights = [weight for weight, _ in blend]
    caps = [cap for _, cap in blend]
    most = longest_stage(weights, caps, redistribute=True)
    if most is None or total <= most:
        assert capped_shares(weights, caps, total) == [
            x / total for x in water_level(weights, caps, total)
        ]
