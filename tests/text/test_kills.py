"""Builds of text that are killed, on several ranks: the next one goes on, and makes the same bytes.

MEGABLEND_TEST_TEXT_KILLS sets how many builds the long part kills.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.text.test_build import make_config, token_files, write_text

KILLS = int(os.environ.get("MEGABLEND_TEST_TEXT_KILLS", "100"))
NUM_FILES = 24
MARK = "MEGABLEND_TEST_MARK"


def start(config: Path, ranks: int, processes: int, mark: str) -> subprocess.Popen[bytes]:
    build = [sys.executable, "-m", "megablend", "build", str(config), "--processes", str(processes)]
    command = ["mpirun", "-n", str(ranks), *build] if ranks > 1 else build
    return subprocess.Popen(
        command,
        env={**os.environ, MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


def finish(config: Path, ranks: int) -> None:
    process = start(config, ranks, 2, "")
    _, said = process.communicate(timeout=500)
    assert process.returncode == 0, said.decode()


def list_processes(mark: str, what: str) -> list[int]:
    """Ids of the processes of a build that are ranks, workers, or any."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                line = (path / "cmdline").read_bytes().decode()
                is_worker = "megablend.text.pool" in line
                is_rank = "megablend\0build" in line and not line.startswith("mpirun")
                if (
                    what == "all"
                    or (what == "worker" and is_worker)
                    or (what == "rank" and is_rank)
                ):
                    found.append(int(path.name))
    return found


def kill_one_build(folder: Path, config: Path, ranks: int, chosen: random.Random) -> str:
    """Start a build, and kill some of it once it has made a number of files. Returns: what was killed."""
    what = chosen.choice(["rank", "worker", "all"])
    mark = uuid.uuid4().hex
    had = len(token_files(folder))
    wanted = min(had + chosen.randrange(1, 6), NUM_FILES)
    process = start(config, ranks, 2, mark)
    while process.poll() is None and len(token_files(folder)) < wanted:
        time.sleep(0.01)
    victims = list_processes(mark, what)
    if what != "all":
        victims = victims and [chosen.choice(victims)]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=500)
    deadline = time.monotonic() + 60
    while (left := list_processes(mark, "all")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, "processes outlive their build"
    if not victims:
        return ""
    if what == "worker" and process.returncode:
        assert b"the process that was tokenising this file exited (signal 9)" in said
    return what


def campaign(tmp_path: Path, kills: int, seed: int, most_ranks: int) -> None:
    write_text(tmp_path / "data", num_files=NUM_FILES, num=480)
    config = make_config(tmp_path, eos=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(config | {"cache": str(tmp_path / "whole")}))
    finish(whole, 1)
    expected = token_files(tmp_path / "whole/tokens")
    assert len(expected) == NUM_FILES
    chosen = random.Random(seed)
    killed = 0
    tokens = tmp_path / "cache/tokens"
    while killed < kills:
        ranks = chosen.randrange(1, most_ranks + 1)
        for _ in range(3):
            killed += bool(kill_one_build(tokens, path, ranks, chosen))
            found = token_files(tokens)
            assert found.items() <= expected.items()
        finish(path, ranks)
        assert token_files(tokens) == expected
        shutil.rmtree(tmp_path / "cache")


@pytest.mark.long
def test_a_few_kills(tmp_path: Path) -> None:
    campaign(tmp_path, 3, 1, 2)


@pytest.mark.slow
@pytest.mark.timeout(300 + 30 * KILLS)
def test_many_kills(tmp_path: Path) -> None:
    campaign(tmp_path, KILLS, 2, 8)
