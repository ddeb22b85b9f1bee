"""Jobs of PyTorch's processes, as torchrun starts them, without its seconds."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import megablend
from tests.preloaded import python

_SECONDS = 150
"""Within which a job has to end; see `pytest.mark.timeout` of its test."""


def run_ranks(num_ranks: int, *arguments: str) -> list[str]:
    """Run a script, and its arguments, on so many ranks. Returns: the output of each. Fails if one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(megablend.__file__).parents[1]),
    }
    ranks = [
        subprocess.Popen(
            [*python("torch"), *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, outputs
    return [out for out, _ in outputs]
