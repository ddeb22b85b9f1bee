"""Damage to a cache or to data with checksums gives the same tokens or an error, never others; mutation_worker.py does it.

MEGABLEND_MUTATIONS sets how many mutations the long test makes, MEGABLEND_SEED with which seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest

import megablend
from tests.preloaded import python

WORKER = Path(__file__).with_name("mutation_worker.py")
IN_MEMORY = Path("/dev/shm")
BATCH = 5000
"""Mutations a process."""
TIMEOUT_S = 7200
MANY = int(os.environ.get("MEGABLEND_MUTATIONS", "2000"))
SEED = os.environ.get("MEGABLEND_SEED", "17")


def damage(folder: Path, start: int, stop: int) -> Counter[str]:
    """Mutations from `start` up to `stop`, in one process: how many ended how."""
    path = os.pathsep.join(
        [str(Path(megablend.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    )
    command = [*python(), str(WORKER), str(folder), SEED, str(start), str(stop)]
    with (folder / "log").open("w+", encoding="utf-8") as log:
        done = subprocess.run(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        )
        log.seek(0)
        lines = log.read().splitlines()
    current = folder / f"current-{start}"
    what = f"status {done.returncode} at {current.read_text() if current.exists() else 'the start'}: {lines[-25:]}"
    assert done.returncode == 0, what
    return Counter(json.loads(lines[-1]))


@pytest.mark.parametrize(
    "count", [60, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(86_400)])]
)
def test_mutations_never_give_other_tokens_where_there_is_a_checksum(count: int) -> None:
    counts: Counter[str] = Counter()
    memory = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="megablend-mutations-") as folder:
        for start in range(0, count, BATCH):
            counts += damage(Path(folder), start, min(start + BATCH, count))
    print(f"{sum(counts.values())} mutations: {dict(counts)}")
    assert sum(counts.values()) == count
    assert counts["cache refused"] > counts["cache same"]
    assert not counts["cache other"]
    assert not counts["data .parquet other"]
    assert not counts["data .idx other"]
