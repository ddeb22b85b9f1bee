"""No two places of the package share six identical lines, parameter lists included; imports are not compared."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent / "megablend"
LINES = 6
KNOWN = {
    ("api/build.py", "api/build.py"): "two public functions with the same keywords",
    ("reader/loader.py", "reader/sampler.py"): "two public classes with the same keywords",
    ("kernels/plan/inverse.py", "kernels/plan/lanes.py"): "a function and its inverse: arrays of the same tree",
}
"""Parameter lists that are alike for a reason."""

Line = tuple[str, int]
"""A file and a line number."""


def code_lines(source: str) -> list[tuple[int, str]]:
    """Numbers and texts of lines, without indentation, blank lines, comments and imports."""
    skipped = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = ((number, text.strip()) for number, text in enumerate(source.splitlines(), 1) if number not in skipped)
    return [(number, text) for number, text in lines if text and not text.startswith("#")]


def find_duplicates(sources: Mapping[str, str], length: int = LINES) -> list[tuple[Line, Line]]:
    """Pairs of places that share `length` lines or more; of a longer stretch, only where it begins."""
    places: dict[tuple[str, ...], list[tuple[str, int, int]]] = {}
    for name, source in sources.items():
        lines = code_lines(source)
        for i in range(len(lines) - length + 1):
            key = tuple(text for _, text in lines[i : i + length])
            places.setdefault(key, []).append((name, i, lines[i][0]))
    found: list[tuple[Line, Line]] = []
    seen: set[tuple[str, int, str, int]] = set()
    for group in places.values():
        for a, b in pairs(group):
            seen.add((a[0], a[1], b[0], b[1]))
            if (a[0], a[1] - 1, b[0], b[1] - 1) not in seen:
                found.append(((a[0], a[2]), (b[0], b[2])))
    return found


def pairs(group: list[tuple[str, int, int]]) -> Iterable[tuple[tuple[str, int, int], tuple[str, int, int]]]:
    return ((a, b) for i, a in enumerate(group) for b in group[i + 1 :])


def test_no_two_places_share_six_lines() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    found = find_duplicates(sources)
    assert [(a, b) for a, b in found if (a[0], b[0]) not in KNOWN] == []
    assert len(found) == len(KNOWN), "each of KNOWN is one pair"


def test_duplicates_are_found_where_they_begin() -> None:
    shared = [f"x{i} = {i}" for i in range(7)]
    a = "\n".join(["import os", *shared, "y = 1"])
    b = "\n".join(["if True:", *(f"    {line}" for line in shared), "", "z = 2"])
    assert find_duplicates({"a": a, "b": b}) == [(("a", 2), ("b", 2))]
    assert find_duplicates({"a": a, "b": b}, length=8) == []
    assert find_duplicates({"a": "\n".join([*shared, "y = 1", *shared])}) == [(("a", 1), ("a", 9))]
