"""Damage to a cache or to data with checksums gives the same tokens or an error, never others; mutation_worker.py does it.

MEGABLEND_MUTATIONS sets how many mutations the long test makes, MEGABLEND_SEED with which seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import megablend

WORKER = Path(__file__).with_name("mutation_worker.py")
BATCH = 500
TIMEOUT_S = 1200
MANY = int(os.environ.get("MEGABLEND_MUTATIONS", "2000"))
SEED = os.environ.get("MEGABLEND_SEED", "17")


@pytest.mark.parametrize("count", [60, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(86_400)])])
def test_mutations_never_give_other_tokens_where_there_is_a_checksum(tmp_path: Path, count: int) -> None:
    folders = [Path(megablend.__file__).parent.parent, WORKER.parent.parent / "formats"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    counts: Counter[str] = Counter()
    for start in range(0, count, BATCH):
        command = [sys.executable, str(WORKER), str(tmp_path), SEED, str(start), str(min(start + BATCH, count))]
        with open(tmp_path / "log", "w+", encoding="utf-8") as log:
            try:
                status = subprocess.run(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=TIMEOUT_S,
                    env={**os.environ, "PYTHONPATH": path},
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
            log.seek(0)
            lines = log.read().splitlines()
        assert status == 0, f"status {status} (None: hung) in {lines[-25:]}"
        counts.update(json.loads(lines[-1]))
    print(f"{sum(counts.values())} mutations: {dict(counts)}")
    assert sum(counts.values()) == count
    assert counts["cache refused"] > counts["cache same"] / 4
    assert not counts["cache other"]
