"""Keys and records of a ReadSpec: those of release 0.1.0 stay, and every other field enters them by its name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megablend.config.read_spec import ReadSpec, make_options

PLAIN = ReadSpec(format="arrow", column="ids", count_documents=False, block_bytes=512)


def test_the_key_of_a_plain_spec_is_that_of_the_first_release() -> None:
    assert PLAIN.cache_key() == ["arrow", "ids", 512, False]
    assert dataclasses.replace(PLAIN, allow_float=True).cache_key() == [
        "arrow",
        "ids",
        512,
        False,
        "numbers",
    ]
    assert PLAIN.record() == {"format": "arrow", "column": "ids", "documents": False}


def test_every_field_is_part_of_the_key() -> None:
    changed: dict[str, Any] = {
        "format": "raw",
        "column": None,
        "count_documents": True,
        "block_bytes": 7,
        "allow_float": True,
        "options": make_options({"dtype": "uint16"}),
    }
    assert set(changed) == {each.name for each in dataclasses.fields(ReadSpec)}
    keys = [
        dataclasses.replace(PLAIN, **{name: value}).cache_key() for name, value in changed.items()
    ]
    assert len({json.dumps(key) for key in [*keys, PLAIN.cache_key()]}) == len(changed) + 1


def test_options_are_in_any_order() -> None:
    one = make_options({"a": 1, "b": 2})
    other = make_options({"b": 2, "a": 1})
    assert one == other
    assert ReadSpec(options=one).cache_key()[-1] == {"options": (("a", 1), ("b", 2))}
    assert ReadSpec(options=one).option("b") == 2
    assert ReadSpec(options=one).option("c", 3) == 3


@pytest.mark.parametrize("options", [{}, {"dtype": "uint16", "eod_token": 3}])
def test_a_record_survives_json(options: dict[str, str | int | float | bool | None]) -> None:
    spec = ReadSpec(format="raw", column=None, options=make_options(options))
    record = json.loads(json.dumps({**spec.record(), "name": "x", "first_file": 0}))
    assert ReadSpec.from_record(record) == spec


def test_what_differs_is_named() -> None:
    assert (
        PLAIN.find_difference(
            dataclasses.replace(PLAIN, count_documents=True, block_bytes=3, format=None)
        )
        is None
    )
    assert PLAIN.find_difference(dataclasses.replace(PLAIN, column="x")) == ("column", "ids", "x")
    assert PLAIN.find_difference(dataclasses.replace(PLAIN, format="raw")) == (
        "format",
        "arrow",
        "raw",
    )
    other = dataclasses.replace(PLAIN, options=make_options({"dtype": "uint16"}))
    assert PLAIN.find_difference(other) == ("options", {}, {"dtype": "uint16"})
