"""Python processes that start with the package's modules imported, which takes seconds in each new one.

`python()` is the beginning of a command that takes the arguments of Python itself (`-m MODULE`, `-c CODE` or a script), also
under mpirun or a shell: a small client passes its arguments, environment, limits and open files to a server, which forks a
process for it. What kills the client soon kills that process; its exit code, or the signal that ended it, becomes the client's.
Use `sys.executable` where a test is about imports, options of the interpreter, signals, or namespaces.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

HERE = Path(__file__).parent
CLIENT, SERVER = HERE / "preloaded_client.py", HERE / "preloaded_server.py"
BUILDS = (
    "click",
    "numba.core.typing",
    "pyarrow.parquet",
    "megablend.api.build",
    "megablend.api.manage_runs",
    "megablend.cli.main",
    "megablend.cli.tables",
)
TORCH = (*BUILDS, "torch.utils.data", "torch.distributed.run", "megablend.reader.dataset", "megablend.reader.loader")
MEGATRON = (*TORCH, "tests.eager", "megatron.core.datasets.gpt_dataset", "megablend.megatron")
Imported: TypeAlias = Literal["builds", "torch", "megatron"]
IMPORTED: dict[Imported, tuple[str, ...]] = {"builds": BUILDS, "torch": TORCH, "megatron": MEGATRON}


def python(imported: Imported = "builds") -> list[str]:
    """The beginning of a command: what `megablend build` imports is imported, or also PyTorch, or also Megatron."""
    return [sys.executable, "-I", "-S", str(CLIENT), _start_server(imported)]


@cache
def _start_server(imported: Imported) -> str:
    """The path of the socket of a server, which ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    path = str(Path(folder.name) / "socket")
    server = subprocess.Popen(
        [sys.executable, str(SERVER), path, *IMPORTED[imported]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=HERE.parent,
    )
    assert server.stdout is not None
    assert b"ready\n" in server.stdout  # some packages print as they are imported

    def stop() -> None:
        server.communicate()  # the server ends with its standard input
        folder.cleanup()

    atexit.register(stop)
    return path
