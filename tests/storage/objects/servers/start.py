"""Starting servers for a session: what is not there is skipped, or an error where MEGABLEND_SERVERS=required says so."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

import pytest


def unavailable(what: str) -> NoReturn:
    """Skip a test for want of a server. Raises: what pytest's skip or fail raises."""
    if os.environ.get("MEGABLEND_SERVERS") == "required":
        pytest.fail(f"{what}, and MEGABLEND_SERVERS=required")
    pytest.skip(what)


def make_environment(folder: Path, name: str, packages: list[str]) -> Path:
    """A virtual environment of its own for a server, kept for later sessions. Returns: its bin folder.

    The pip of this environment installs into it, if it can: a pip of its own takes seconds to install.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several sessions may begin at a time
        if not (made / "complete").exists():
            pip = find_pip()
            venv = [sys.executable, "-m", "venv", *(["--without-pip"] if pip else []), str(made)]
            run_pip = [f"{made}/bin/python", *([str(pip)] if pip else ["-m", "pip"])]
            install = [
                *run_pip,
                "install",
                "-q",
                "--no-compile",
                "--disable-pip-version-check",
                *packages,
            ]
            for command in (venv, install):
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=500, check=False
                )
                if done.returncode:
                    unavailable(
                        f"{name} cannot be installed: {(done.stderr or done.stdout)[-300:]}"
                    )
            (made / "complete").touch()
    return made / "bin"


def find_pip() -> Path | None:
    """This environment's script that runs pip in other environments, where its pip has one (22.2 and later)."""
    # Not importlib.util.find_spec: a hook of setuptools would warn
    pip = PathFinder.find_spec("pip")
    script = Path(pip.origin).with_name("__pip-runner__.py") if pip and pip.origin else None
    return script if script and script.exists() else None


def ending_with_parent(command: list[str]) -> list[str]:
    """The command of a process that is terminated when the thread that has started it ends, also if
    that is killed: where util-linux is there."""
    program = shutil.which("setpriv")
    return command if program is None else [program, "--pdeathsig", "TERM", "--", *command]


@contextmanager
def running(command: list[str], log: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A server's process, ended with its children."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            ending_with_parent(command),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            **options,
        )  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def find_ports(count: int) -> list[int]:
    """Free ports of loopback that no connection gets by chance: a server that starts again needs its own."""
    found = set[int]()
    while len(found) < count:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as each:
            each.bind(("127.0.0.1", port))
            found.add(port)
    return sorted(found)


def find_free_port() -> int:
    return find_ports(1)[0]


def wait_for_port(
    port: int, process: subprocess.Popen[str], log: Path, host: str = "127.0.0.1"
) -> None:
    end = time.monotonic() + 500
    while time.monotonic() < end:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((host, port)) == 0:
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    unavailable(f"{process.args!r} did not start: {log.read_text()[-500:]}")
