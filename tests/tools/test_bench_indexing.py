"""The benchmarks of indexing, of whole builds, and of `.bin/.idx` pairs run, tiny."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def lines_of(name: str, *options: str) -> list[str]:
    command = [sys.executable, str(ROOT / "tools" / "bench" / "read" / name), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_benchmark_of_indexing_runs() -> None:
    rows = lines_of("indexing.py", "--pages", "50", "--rounds", "1", "--footers", "2x3,3x2")
    assert [row.split()[:3] for row in rows if " x " in row][1:] == [
        ["2", "x", "3"],
        ["3", "x", "2"],
    ]


@pytest.mark.slow
def test_the_benchmark_of_builds_runs() -> None:
    rows = lines_of("builds.py", "--files", "3", "--distinct", "2", "--old", sys.executable)
    assert [row.split()[0] for row in rows] == ["3", "new", "again", "one"]
    assert all("old / ours: wall" in row for row in rows[1:])


@pytest.mark.slow
def test_the_benchmark_of_pairs_runs() -> None:
    (row,) = lines_of("bin.py", "--corpora", "20000x4096", "--reads", "100", "--rounds", "1")
    assert row.startswith("20,000 documents, block_bytes 4,096")
    assert "us CPU a block" in row
