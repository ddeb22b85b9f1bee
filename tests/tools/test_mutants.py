"""Faults that are put into the package by their text."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import mutants
import pytest

BEFORE = """
def first(items, max_items):
    if len(items) > max_items:
        raise ValueError("too many")
    return items[: max_items - 1]


def second(items, max_items):
    return items[: max_items - 1]
"""
MOVED = """
class Moved:
    def second(self, items, max_items):
        return items[
            : max_items - 1
        ]

    def first(self, items, max_items):
        return items[: max_items - 1]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "megablend").mkdir()
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def test_a_fault_is_found_where_its_text_went(package: Path) -> None:
    path = package / "megablend" / "a.py"
    path.write_text(BEFORE)
    fault = {
        "file": "megablend/a.py",
        "function": "second",
        "text": "return items[: «max_items - 1»]",
        "into": "max_items",
    }
    assert mutants.apply(fault, package) == (
        path,
        BEFORE[::-1].replace("1 - smeti_xam", "smeti_xam", 1)[::-1],
    )
    path.write_text(MOVED)
    assert mutants.apply(fault, package) == (path, MOVED.replace("max_items - 1", "max_items", 1))
    path.write_text("")
    assert mutants.apply(fault, package) is None


def test_faults_are_drawn_with_texts_that_are_there_once(package: Path) -> None:
    path = package / "megablend" / "a.py"
    path.write_text(BEFORE)
    drawn = mutants.draw(1, 99, [path], [])
    # The comparison and its line are one text; what both functions have is none
    assert len(drawn) == 2
    assert {each["function"] for each in drawn} == {"first"}
    for fault in drawn:
        found: Any = mutants.apply(fault, package)
        assert found[1] != BEFORE
        ast.parse(found[1])
    assert drawn == mutants.draw(1, 99, [path], [])
    assert mutants.draw(1, 99, [path], drawn) == []
