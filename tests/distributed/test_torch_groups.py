"""Groups of ranks in a torch job: made once and kept, however many builds the job does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.long
WORKER = Path(__file__).with_name("groups_worker.py")
ROOT = str(Path(__file__).parents[2])
BUILDS = 40


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_job_may_build_forty_times(size: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(size), str(port), str(BUILDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        ended = [rank.communicate(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = sum(number * rank for number in range(BUILDS) for rank in range(size))
    for number, (out, err) in enumerate(ended):
        half = len(range(number % 2, size, 2))
        assert out.split() == [str(said + BUILDS * half)], err
