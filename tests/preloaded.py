"""Python processes that start with the package's modules imported, which takes seconds in each new one.

`python()` is the beginning of a command that takes the arguments of Python itself (`-m MODULE`, `-c CODE` or a script), also
under mpirun or a shell: a small client passes its arguments, environment, limits and open files to a server, which forks a
process for it. What kills the client soon kills that process; its exit code, or the signal that ended it, becomes the client's.
Use `sys.executable` where a test is about imports, options of the interpreter, signals, or namespaces.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

HERE = Path(__file__).parent
CLIENT = HERE / "preloaded_client.py"
SERVER = "tests.preloaded_server"
BUILDS = (
    "click",
    "numba.core.typing",
    "pyarrow.parquet",
    "megablend.operations.build",
    "megablend.operations.manage_runs",
    "megablend.cli.main",
    "megablend.cli.progress",
    "rich.table",
)
TORCH = (
    *BUILDS,
    "torch.utils.data",
    "torch.distributed.run",
    "megablend.reader.dataset",
    "megablend.reader.loader",
)
MEGATRON = (*TORCH, "tests.eager", "megatron.core.datasets.gpt_dataset", "megablend.megatron")
Imported: TypeAlias = Literal["builds", "torch", "megatron"]
IMPORTED: dict[Imported, tuple[str, ...]] = {"builds": BUILDS, "torch": TORCH, "megatron": MEGATRON}


SERVERS = "MEGABLEND_TEST_SERVERS"
"""In the environment: the folder of the servers' sockets."""


def share_servers() -> None:
    """Have this process and those that it starts share servers, which end with this process."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    atexit.register(folder.cleanup)
    alive = Path(folder.name, "alive")
    os.mkfifo(alive)
    os.open(alive, os.O_RDWR)  # left open: the servers' standard input ends with this process
    os.environ[SERVERS] = folder.name


def python(imported: Imported = "builds") -> list[str]:
    """The beginning of a command: what `megablend build` imports is imported, or also PyTorch, or also Megatron."""
    if SERVERS not in os.environ:
        share_servers()
    return [sys.executable, "-I", "-S", str(CLIENT), _find_server(imported)]


def write_program(path: Path, imported: Imported = "builds") -> str:
    """Make `path` a program that does what `python()` does, where a command must be a single word."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(python(imported))} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@cache
def _find_server(imported: Imported) -> str:
    """The path of the socket of a server, which is started if there is none yet."""
    folder = Path(os.environ[SERVERS])
    path = folder / imported
    with (folder / f"{imported}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with (folder / "alive").open("rb") as alive:
                # As a module: `import inspect` of a script would find tests/inspect
                command = [sys.executable, "-m", SERVER, str(path), *IMPORTED[imported]]
                subprocess.run(
                    command, stdin=alive, stdout=subprocess.DEVNULL, cwd=HERE.parent, check=True
                )
    return str(path)
