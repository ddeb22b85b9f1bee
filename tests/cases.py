"""Which cases of a test run every time, where all of them find little more: the others are marked `slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = Any
"""An argument of `pytest.mark.parametrize`: a value, a tuple of values, or what `pytest.param` returns."""


def others_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Case]:
    """The cases: those of `quick` as they are, the others marked `slow`."""
    listed = list(cases)
    assert all(each in listed for each in quick), "each quick case is a case"
    return [each if each in quick else make_slow(each) for each in listed]


def make_slow(case: Any) -> Case:
    """The case, marked `slow`."""
    return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)


def each_pair(*values: Sequence[Any]) -> list[Case]:
    """All combinations of one value of each sequence: enough of them as they are that every two
    values of two sequences occur together, the others marked `slow`."""
    combined = list(product(*(range(len(each)) for each in values)))
    pairs = {numbers: set(combinations(enumerate(numbers), 2)) for numbers in combined}
    missing = set().union(*pairs.values())
    quick = set()
    while missing:
        most = max(combined, key=lambda numbers: len(pairs[numbers] & missing))
        missing -= pairs[most]
        quick.add(most)
    return [
        pytest.param(
            *(each[i] for each, i in zip(values, numbers, strict=True)),
            marks=() if numbers in quick else pytest.mark.slow,
        )
        for numbers in combined
    ]


def chequered(first: Sequence[Any], second: Sequence[Any]) -> list[Case]:
    """All pairs of a value of each: every other one as it is, like the fields of a chessboard, the others marked `slow`."""
    assert min(len(first), len(second)) > 1, "a value of a sequence of one would never be quick"
    return [
        pytest.param(one, other, marks=pytest.mark.slow if (i + k) % 2 else ())
        for i, one in enumerate(first)
        for k, other in enumerate(second)
    ]
