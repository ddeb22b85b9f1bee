from __future__ import annotations

import sys
from types import NoneType

import pytest

from megablend.system.limited_json import MAX_DEPTH, fits, is_count, missing_field, parse_json


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 900, 100_000])
@pytest.mark.parametrize(
    ("opens", "inside", "closes"), [("[", "", "]"), ('{"a":', "1", "}"), ('[{"a":', "1", "}]")]
)
def test_deep_json_is_refused(opens: str, inside: str, closes: str, depth: int) -> None:
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} deep"):
        parse_json(opens * depth + inside + closes * depth)


@pytest.mark.parametrize(
    "text", ["1", "[]", '{"a": [1, {"b": null}]}', "[" * MAX_DEPTH + "]" * MAX_DEPTH]
)
def test_other_json_is_read(text: str) -> None:
    assert parse_json(text) == parse_json(text.encode())


ENDLESS = pytest.param(
    "9" * 10_000,
    marks=pytest.mark.skipif(
        not hasattr(sys, "set_int_max_str_digits"),
        reason="Python before 3.10.7 reads numbers of any length",
    ),
)


@pytest.mark.parametrize("text", ["", "[", "{1: 2}", b"\xff", ENDLESS])
def test_what_is_not_json(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    ("value", "missing"),
    [
        ({"a": 1, "b": "x"}, None),
        ({"a": 1}, "b"),
        ({"a": True, "b": "x"}, "a"),
        ({"a": "1", "b": "x"}, "a"),
        ([1], "the structure of an object"),
        ({"a": 1, "b": None}, "b"),
    ],
)
def test_missing_fields(value: object, missing: str | None) -> None:
    assert missing_field(value, {"a": int, "b": str}) == missing


@pytest.mark.parametrize(
    ("shape", "valid", "invalid"),
    [
        (int, [0, -1, 1 << 80], [True, 1.0, "1", None]),
        (bool, [True], [1, None]),
        ((int, NoneType), [1, None], [True, "x", []]),
        ([int], [[], [1, 2]], [(1,), [1, "x"], [1, True], {"a": 1}, 1]),
        ([[str]], [[], [["a"], []]], [["a"], [[1]]]),
        ({str: int}, [{}, {"a": 1, "b": 2}], [{"a": "x"}, {"a": 1, "b": None}, [1], 1]),
        (
            {"a": int, "b": [str]},
            [{"a": 1, "b": []}, {"a": 1, "b": ["x"], "other": None}],
            [{"a": 1}, {"b": []}, {"a": 1, "b": [1]}, {"a": "1", "b": []}, [], None],
        ),
        ({"a": NoneType}, [{"a": None}], [{}, {"a": 0}]),
        (is_count, [0, 5], [-1, True, "1"]),
    ],
)
def test_shapes(shape: object, valid: list[object], invalid: list[object]) -> None:
    assert [value for value in valid if not fits(value, shape)] == []
    assert [value for value in invalid if fits(value, shape)] == []
