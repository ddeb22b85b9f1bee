"""Sum the coverage of files by the package's folders.

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
        f"{name:12} {covered / lines if lines else 1:7.1%}  of {lines:6,} lines" for name, (covered, lines) in rows
    )


if __name__ == "__main__":
    print(format_table(sum_folders(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["files"])))
