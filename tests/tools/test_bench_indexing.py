"""The benchmark of indexing runs, tiny."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_benchmark_of_indexing_runs() -> None:
    options = ["--pages", "50", "--rounds", "1", "--files", "3", "--footers", "2x3,3x2"]
    command = [sys.executable, str(ROOT / "tools" / "bench" / "read" / "indexing.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert [row.split()[:3] for row in rows if " x " in row][1:] == [["2", "x", "3"], ["3", "x", "2"]]
    assert rows[-1].startswith("one file more")
