"""Workers end when the trainer is killed, however they were started, also while they are blocked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

import megablend
from tests.cases import chequered
from tests.runs import documents, make_config, write_source

pytestmark = pytest.mark.long
MOST_SECONDS = 100


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("state", "method"), chequered(["idle", "blocked"], ["fork", "forkserver", "spawn"])
)
def test_workers_end_with_a_killed_trainer(tmp_path: Path, method: str, state: str) -> None:
    source = write_source(tmp_path, 0, "parquet", documents(0, 60, 40, 3)) | {"weight": 1}
    config = make_config(tmp_path, [source], samples=64)
    megablend.build(config)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    worker = Path(__file__).with_name("orphans_worker.py")
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(worker), str(path), method, state], stdout=subprocess.PIPE, env=environ
    ) as trainer:
        try:
            assert trainer.stdout is not None
            assert wait([trainer.stdout.fileno()], MOST_SECONDS)
            workers = list(map(int, trainer.stdout.readline().split()))
            assert len(workers) == 2
            assert all(map(is_running, workers))
        finally:
            trainer.kill()
            trainer.wait()
    deadline = time.monotonic() + MOST_SECONDS
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
