"""After a fork: a child of a process that has used the client is refused at once; others work."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time

import pytest

from megablend.errors import ConfigError
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.loop import FORK_REMEDY
from tests.preloaded import python
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")


def read_in_child(storage: Storage, url: str) -> str:
    try:
        return storage.read(url, 0, 4).decode()
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_that_are_not_forked_read_with_the_parents_options(method: str) -> None:
    with FaultySource({"b/x": b"0123456789"}) as source:
        storage = make_storage()
        url = f"{source.url}/b/x"
        assert storage.read(url, 0, 4) == b"0123"
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply_async(read_in_child, (storage, url)).get(timeout=500) == "0123"


def test_a_forked_child_is_refused_rather_than_tried_again() -> None:
    with FaultySource({"b/x": b"0123456789"}) as source:
        storage = make_storage()
        url = f"{source.url}/b/x"
        assert storage.read(url, 0, 4) == b"0123"
        for again in (storage, make_storage()):
            pid = os.fork()
            if not pid:
                begin = time.monotonic()
                status = 1
                try:
                    said = read_in_child(again, url)
                    status = 0 if FORK_REMEDY in said and time.monotonic() - begin < 200 else 2
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert storage.read(url, 0, 4) == b"0123"


FORK_FIRST = """
import os, sys
from megablend.storage.by_scheme import make_storage
from megablend.storage.objects.loop import FORK_REMEDY
storage = make_storage()
if not (pid := os.fork()):
    os._exit(storage.read(sys.argv[1], 0, 4) != b"0123")
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert storage.read(sys.argv[1], 0, 4) == b"0123"
"""


def test_a_fork_before_the_first_read() -> None:
    """As the remedy of the other one says."""
    with FaultySource({"b/x": b"0123456789"}) as source:
        command = [*python(), "-c", FORK_FIRST, f"{source.url}/b/x"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
