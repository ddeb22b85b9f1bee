from __future__ import annotations

from itertools import combinations, product

from tests.cases import chequered, each_pair, others_slow


def test_every_two_values_occur_together_in_a_quick_case() -> None:
    values = ["abc", "de", "fghi"]
    cases = each_pair(*values)
    assert [case.values for case in cases] == list(product(*values))
    quick = [case.values for case in cases if not case.marks]
    for first, second in combinations(values, 2):
        for pair in product(first, second):
            assert any(set(pair) <= set(case) for case in quick)
    assert len(quick) == 12  # of 24: as many as the two longest have pairs


def test_cases_that_are_not_named_are_slow() -> None:
    first, second = others_slow("xy", quick="x")
    assert first == "x"
    assert second.values == ("y",)
    assert [mark.name for mark in second.marks] == ["slow"]
    (pair,) = others_slow([(1, 2)], quick=())
    assert pair.values == (1, 2)


def test_every_other_pair_is_quick() -> None:
    cases = chequered("ab", "xy")
    assert [case.values for case in cases if not case.marks] == [("a", "x"), ("b", "y")]
    assert len(cases) == 4
