"""The benchmark of datasets on all nodes, on two files."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mirror.namespaces import find_obstacle

SCRIPT = Path(__file__).parent.parent.parent / "tools/bench/mirror/all_copies.py"


@pytest.mark.slow  # it starts three node processes, and makes namespaces
def test_each_contender_brings_all_files_to_all_nodes() -> None:
    """The benchmark itself compares the files."""
    pytest.importorskip("obstore")
    missing = [each for each in ("etcd", "rclone", "rsync") if shutil.which(each) is None]
    if (obstacle := find_obstacle() or ", ".join(missing)) != "":
        pytest.skip(f"not here: {obstacle}")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--mb", "2", "--nodes", "1,2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = r"^ +(\d) (rclone|obstore|nginx ring|rsyncs|megablend) +[\d.]+ +[\d.]+x +([\d.]+)"
    shares = {
        (count, name): float(share) for count, name, share in re.findall(row, done.stdout, re.M)
    }
    assert len(shares) == 10, done.stdout
    # Sent by the source, in parts of the files: headers of packets are counted, too
    assert 1.9 < shares["2", "rclone"] < 2.3
    assert 0.9 < shares["2", "megablend"] < 1.3
