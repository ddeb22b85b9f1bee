"""A process that ends while its requests are in flight: with its own exit code, and without a word of the client."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.index.index_data import environment
from tests.storage.faulty import Faults, FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
SCRIPT = """
import ctypes
import sys
import numpy as np
from megablend.storage.by_scheme import make_storage

ctypes.CDLL(None).on_exit(ctypes.CDLL(None).sleep, None)  # as many seconds as the exit code, after the interpreter
storage, url = make_storage(), sys.argv[1]
reads = [storage.fetch(url, np.array([i]), np.array([9]), lambda size: np.empty(size, np.uint8)) for i in range(300)]
if sys.argv[2] == "cancel":
    for read in reads:
        read.cancel()
elif sys.argv[2] == "interrupt":
    raise KeyboardInterrupt
sys.exit(2)
"""


@pytest.mark.parametrize("how", ["exit", "cancel", "interrupt"])
def test_a_process_ends_while_requests_are_in_flight(how: str) -> None:
    with FaultySource({"b/x": bytes(1000)}, Faults(latency=0.5)) as source:
        command = [sys.executable, "-c", SCRIPT, f"{source.url}/b/x", how]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, check=False, env=environment()
        )
    lines = done.stderr.splitlines()
    if how == "interrupt":
        assert (done.returncode, lines[0], lines[-1]) == (
            -2,
            "Traceback (most recent call last):",
            "KeyboardInterrupt",
        )
        assert len(lines) < 5
    else:
        assert (done.returncode, done.stderr) == (2, "")
