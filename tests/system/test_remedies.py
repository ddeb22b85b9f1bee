"""Remedies of paths, threads and memory: done as the messages say."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import megablend
from megablend.errors import CacheError, ConfigError
from tests.api.test_remedies_of_runs import configure
from tests.api.test_repairs import Project

THREADS = """
import os, resource, sys, threading
from megablend.system.failures import translating
limit, wait = int(sys.argv[1]), threading.Event()
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
try:
    with translating("loader"):
        for _ in range(40):
            threading.Thread(target=wait.wait, daemon=True).start()
except Exception as error:
    print(error)
"""
MEMORY = """
import resource, sys
import numpy as np
from megablend.system.failures import translating
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with translating("sample 3"):
        np.empty(1 << 30, np.uint8)
except Exception as error:
    print(error)
"""


def run(script: str, argument: int) -> str:
    """What a process prints: an error's message, or nothing."""
    command = [sys.executable, "-c", script, str(argument)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user, whom the limit binds")
def test_too_few_threads() -> None:
    says = r"loader: the system refuses to start more threads: raise the limit \(`ulimit -u`\), or stop other processes"
    assert re.search(says, run(THREADS, 10))
    assert run(THREADS, 1000) == ""


def test_too_little_memory() -> None:
    says = (
        r"sample 3: out of memory \(.*\): the machine, or the job's limit, has no memory left: stop other processes, or"
    )
    assert re.search(says, run(MEMORY, 1 << 30))
    assert run(MEMORY, 4 << 30) == ""
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("remedy", ["check the path", "use another folder"])
def test_a_folder_that_is_a_file(tmp_path: Path, remedy: str) -> None:
    project = Project(tmp_path)
    (tmp_path / "file").write_text("")
    configure(cache=str(tmp_path / "file" / "cache"))(project)
    with pytest.raises(
        CacheError, match=r"Not a directory\): check the path and the file system, or use another folder"
    ):
        megablend.build(str(project.path))
    if remedy == "check the path":
        (tmp_path / "file").unlink()
    else:
        configure(cache=str(tmp_path / "another"))(project)
    megablend.build(str(project.path))
    assert project.read() == project.tokens


def test_a_folder_to_write_to_that_does_not_exist(tmp_path: Path) -> None:
    project = Project(tmp_path)
    target = tmp_path / "none" / "order.parquet"
    says = "its folder does not exist; create it, or write to another folder"
    with pytest.raises(ConfigError, match=f"{target}: {says}"):
        megablend.export(str(project.path), target)
    megablend.export(str(project.path), tmp_path / "order.parquet")
    target.parent.mkdir()
    megablend.export(str(project.path), target)
    assert target.read_bytes() == (tmp_path / "order.parquet").read_bytes()
