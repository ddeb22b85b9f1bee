"""Damaged files never crash, hang or raise anything foreign; fuzz_worker.py says what a mutation must not do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megablend

WORKER = Path(__file__).with_name("fuzz_worker.py")
BATCH = 500
TIMEOUT_S = 280


@pytest.mark.long
@pytest.mark.parametrize(
    "num_mutations",
    [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_mutated_files_are_refused_or_read(tmp_path: Path, num_mutations: int) -> None:
    root = str(Path(megablend.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    for start in range(0, num_mutations, BATCH):
        stop = min(start + BATCH, num_mutations)
        command = [sys.executable, str(WORKER), str(tmp_path), "11", str(start), str(stop)]
        with open(tmp_path / "log", "w+", encoding="utf-8") as log:
            try:
                status = subprocess.run(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=TIMEOUT_S,
                    env={**os.environ, "PYTHONPATH": path},
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
            log.seek(0)
            lines = log.read().splitlines()
        assert status == 0, f"status {status} (None: hung) in {lines[-25:]}"
        assert lines[-1] == "all mutations met"
