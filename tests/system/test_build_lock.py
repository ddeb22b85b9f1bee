from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megablend.errors import CacheError
from megablend.system.build_lock import build_lock, verify_shared_filesystem
from tests.index.index_data import environment

HOLD = """
import sys, time
from pathlib import Path
from megablend.system.build_lock import build_lock
with build_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(3600)
"""


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        says = rf"host {os.uname().nodename}, pid {holder.pid}"
        with pytest.raises(CacheError, match=says), build_lock(tmp_path, wait_seconds=0.2):
            pass
        holder.send_signal(signal.SIGKILL)
    with build_lock(tmp_path) as held:
        assert held.exclusive


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with build_lock(tmp_path) as held:
        assert not held.exclusive


def test_a_lock_that_cannot_be_released_names_its_file(tmp_path: Path) -> None:
    def hold_one_that_is_closed() -> None:
        with build_lock(tmp_path):
            (own,) = [fd for fd in Path("/proc/self/fd").iterdir() if is_lock(tmp_path, fd)]
            os.close(int(own.name))

    with pytest.raises(
        CacheError, match=rf"^{tmp_path}/\.lock: cannot write the cache \(Bad file descriptor\)"
    ):
        hold_one_that_is_closed()
    with build_lock(tmp_path) as held:
        assert held.exclusive


def is_lock(folder: Path, fd: Path) -> bool:
    try:
        return fd.readlink() == folder / ".lock"
    except FileNotFoundError:  # the descriptor of the listing
        return False


def test_a_failing_lock_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (
        pytest.raises(CacheError, match=rf"{tmp_path}/.lock: .*Input/output error"),
        build_lock(tmp_path),
    ):
        pass


def test_a_rank_that_sees_another_cache_says_so(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with build_lock(tmp_path) as held:
        verify_shared_filesystem(tmp_path, held.nonce)
        with pytest.raises(
            CacheError, match=r"not the one that rank 0 sees; .* a file system that all ranks share"
        ):
            verify_shared_filesystem(tmp_path / "other", held.nonce, seconds=0.2)
