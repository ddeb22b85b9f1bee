"""A process that ends while its requests are in flight: with its own exit code, and without a word of the client."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from megablend.errors import MissingFileError
from megablend.storage.objects import loop
from megablend.storage.objects.loop import _cancel_all
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
BURN = "import time; end = time.monotonic() + 280\nwhile time.monotonic() < end: pass"
POLICY = """
import asyncio
import sys
import numpy as np
from megablend.storage.by_scheme import make_storage

class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        raise RuntimeError("this loop is not for megablend")

asyncio.set_event_loop_policy(Policy())
read = make_storage().fetch(sys.argv[1], np.array([3]), np.array([9]), lambda size: np.empty(size, np.uint8))
print(read.result(timeout=60)[0].tobytes().decode())
"""
PR_SET_NAME = 15


WAYS = ("exit", "cancel", "interrupt")


def end_well(url: str, how: str) -> None:
    """Run a process that ends in one of the ways, and check its exit code and what it says."""
    command = [sys.executable, "-c", SCRIPT, url, how]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env=environment()
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


@pytest.mark.parametrize("how", WAYS)
def test_a_process_ends_while_requests_are_in_flight(how: str) -> None:
    with FaultySource({"b/x": bytes(1000)}, Faults(latency=0.5)) as source:
        end_well(f"{source.url}/b/x", how)


def test_objects_are_read_whatever_event_loops_the_program_prefers() -> None:
    """As uvloop.install() sets a policy, for a program's own loops."""
    with FaultySource({"b/x": bytes(range(97, 117))}, Faults()) as source:
        command = [sys.executable, "-W", "ignore", "-c", POLICY, f"{source.url}/b/x"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=500, check=False, env=environment()
        )
    assert (done.returncode, done.stdout) == (0, "defghijkl\n"), done.stderr


def test_what_a_cancelled_read_raises_is_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    """As when several files of a build fail together: the first error cancels the other reads."""
    begun = threading.Event()

    async def fail() -> None:
        begun.set()
        try:
            await asyncio.sleep(500)
        except asyncio.CancelledError:
            raise MissingFileError("s3://b/x", "no such object") from None

    read = loop.submit(fail())
    assert begun.wait(timeout=500)
    assert read.cancel()
    del read
    for _ in range(3):
        loop.run(asyncio.sleep(0))
        gc.collect()  # asyncio prints the exception of a task that is lost
    assert caplog.text == ""


@pytest.mark.slow
def test_processes_end_well_on_a_busy_machine() -> None:
    """The client's threads wait for cores, and drop what was cancelled much later."""
    cores = len(os.sched_getaffinity(0))
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(3 * cores)]
    try:
        with (
            FaultySource({"b/x": bytes(1000)}, Faults(latency=0.5)) as source,
            ThreadPoolExecutor(3 * cores) as threads,
        ):
            for _ in threads.map(partial(end_well, f"{source.url}/b/x"), WAYS * 12):
                pass
    finally:
        for each in burners:
            each.kill()
            each.wait()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux names threads there")
def test_the_end_waits_for_the_client_s_threads() -> None:
    """By their name: a thread that is called as they are, and has work for a while."""
    begun = threading.Event()
    ended = threading.Event()
    is_busy = True

    def work() -> None:
        nonlocal is_busy
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"tokio-rt-worker", 0, 0, 0)
        begun.set()
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            hashlib.sha256(bytes(1 << 20))  # without Python's lock
        is_busy = False
        ended.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    asyncio.run(_cancel_all())
    was_busy = is_busy
    ended.set()
    thread.join()
    assert not was_busy
