from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.blend.allocate import (
    MAX_CYCLES_PER_RUN,
    cycles_per_run,
    largest_remainder,
    stage_totals,
)
from megablend.errors import PlanError
from tests.examples import examples

WEIGHTS = st.lists(st.one_of(st.integers(0, 9), st.fractions(0, 3)), min_size=1, max_size=8).filter(
    any
)


@examples(100)
@given(WEIGHTS, st.integers(0, 10**15))
def test_totals_are_exact_and_within_one(weights: list[int | Fraction], total: int) -> None:
    totals = largest_remainder(weights, total)
    assert sum(totals) == total
    for weight, count in zip(weights, totals, strict=True):
        assert abs(count - Fraction(weight) * total / sum(weights)) < 1


def test_ties_go_by_source_order() -> None:
    assert largest_remainder([1, 1, 1], 4) == [2, 1, 1]
    assert largest_remainder([Fraction(1, 10)] * 3, 5) == [2, 2, 1]


def test_the_largest_remainder_wins() -> None:
    assert largest_remainder([Fraction("0.5"), Fraction("0.3"), Fraction("0.2")], 9) == [4, 3, 2]


def test_large_numbers_are_exact() -> None:
    totals = largest_remainder([1] * 32_000, 10**13 + 1)
    assert totals == [312_500_001] + [312_500_000] * 31_999


@examples(40)
@given(WEIGHTS, st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_appended_stages_stay_near_the_share(
    weights: list[int | Fraction], lengths: list[int]
) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    totals = stage_totals(weights, ends)
    given_ = [0] * len(weights)
    for stage, length, end in zip(totals, lengths, ends, strict=True):
        assert sum(stage) == length
        assert min(stage) >= 0
        given_ = [had + more for had, more in zip(given_, stage, strict=True)]
        for weight, count in zip(weights, given_, strict=True):
            assert abs(count - Fraction(weight) * end / sum(weights)) < 2


@examples(20)
@given(WEIGHTS, st.lists(st.integers(1, 50), min_size=2, max_size=9))
def test_more_stages_do_not_change_the_first(
    weights: list[int | Fraction], lengths: list[int]
) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    assert stage_totals(weights, ends[:-1]) == stage_totals(weights, ends)[:-1]


@pytest.mark.parametrize("weights", [[1, 1], [1] * 37, [1000, 1, 1], [2**i for i in range(12)]])
def test_a_thousand_appends_of_one_sample(weights: list[int]) -> None:
    given_ = [0] * len(weights)
    for end, stage in enumerate(stage_totals(weights, range(1, 1001)), 1):
        given_ = [had + more for had, more in zip(given_, stage, strict=True)]
        worst = max(
            abs(Fraction(w * end, sum(weights)) - n) for w, n in zip(weights, given_, strict=True)
        )
        assert worst < 2


def test_cycles_per_run_holds_twenty_blocks() -> None:
    assert cycles_per_run(16_384, 1, 4096, 512) == 1
    assert cycles_per_run(1_000, Fraction(1, 100), 100, 10) == MAX_CYCLES_PER_RUN
    assert cycles_per_run(Fraction(1000), Fraction(1, 2), 1000, 8) == 5
    assert cycles_per_run(Fraction(1001), Fraction(1, 2), 1000, 8) == 6
    assert cycles_per_run(1000, 0, 1000, 8) == 1


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(PlanError, match=r"source 1 has weight -1/2; expected 0 or more"):
        largest_remainder([1, Fraction(-1, 2)], 5)
    with pytest.raises(PlanError, match="all weights are 0"):
        largest_remainder([0, 0], 5)
    with pytest.raises(PlanError, match="cannot divide -1 samples"):
        largest_remainder([1], -1)
    with pytest.raises(
        PlanError,
        match="a stage ends at sample 5, but begins at sample 5; the end must be a later sample",
    ):
        stage_totals([1], [5, 5])
