"""Sum the coverage of files by the package's folders, and list the files of which less than 85 % is covered.

python -m coverage json -o coverage.json && python tools/sum_coverage.py coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any


def sum_folders(files: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Covered lines, and all lines with code, by the first folder below the package; "." for files directly in it.

    Args:
        files: the `files` of coverage's JSON report.
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, file in files.items():
        below = PurePath(path).parts
        below = below[below.index("megablend") + 1 :]
        folder = below[0] if len(below) > 1 else "."
        sums[folder][0] += file["summary"]["covered_lines"]
        sums[folder][1] += file["summary"]["num_statements"]
    return {folder: (covered, lines) for folder, (covered, lines) in sorted(sums.items())}


def format_table(sums: Mapping[str, tuple[int, int]]) -> str:
    """A line for each folder, and one for all of them."""
    total = tuple(map(sum, zip(*sums.values(), strict=True)))
    rows = [*sums.items(), ("all", total)]
    return "\n".join(
        f"{name:12} {covered / lines if lines else 1:7.1%}  of {lines:6,} lines"
        for name, (covered, lines) in rows
    )


def list_low(files: Mapping[str, Mapping[str, Any]], least: float = 0.85) -> list[str]:
    """A line for each file of which a smaller part than `least` is covered, the smallest part first.

    Args:
        files: the `files` of coverage's JSON report.
    """
    parts = []
    for path, file in files.items():
        lines = file["summary"]["num_statements"]
        if lines and file["summary"]["covered_lines"] < least * lines:
            parts.append((file["summary"]["covered_lines"] / lines, lines, path))
    return [f"{part:7.1%}  of {lines:6,} lines  {path}" for part, lines, path in sorted(parts)]


if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["files"]
    print(format_table(sum_folders(measured)), "Files below 85 %:", *list_low(measured), sep="\n")
