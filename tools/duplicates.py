"""Prints the places of the package that share lines: imports are not compared, parameter lists are.

A report to read before code is joined, not a rule: python tools/duplicates.py [--lines 6]
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent / "megablend"
LINES = 6

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
    lines = (
        (number, text.strip())
        for number, text in enumerate(source.splitlines(), 1)
        if number not in skipped
    )
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
        for a, b in combinations(group, 2):
            seen.add((a[0], a[1], b[0], b[1]))
            if (a[0], a[1] - 1, b[0], b[1] - 1) not in seen:
                found.append(((a[0], a[2]), (b[0], b[2])))
    return found


def main() -> None:
    """Print each pair, and how many there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lines",
        type=int,
        default=LINES,
        help=f"how many lines two places share (default: {LINES})",
    )
    length = parser.parse_args().lines
    sources = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.rglob("*.py"))
    }
    found = find_duplicates(sources, length)
    for first, second in found:
        print("megablend/{}:{} and megablend/{}:{}".format(*first, *second))
    print(f"{len(found)} pairs of places share {length} lines or more")


if __name__ == "__main__":
    main()
