"""Remedies where a rank sees another folder than rank 0: real ranks, one of which has a file system of its own mounted there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megablend
from tests.index.index_data import environment
from tests.runs import documents, make_config, write_source

MPIRUN = Path(sys.executable).with_name("mpirun")
ADVICE = "all ranks share, or run all ranks on one node"
SHARED = "use a .* on a file system that all ranks share, or run all ranks on one node"
MOUNTS = {
    # a folder of the cache that rank 1 has of its own, and what is said of it
    ".": f"the cache on .* is not the one that rank 0 sees; {SHARED}",
    "fragments": f"rank 0 does not see this file, which another rank wrote; {SHARED}",
    "lengths": f"rank 0 cannot read all of this file, which another rank wrote; use a cache on .*{ADVICE}",
}


def build(path: Path, mount: Path | None) -> subprocess.CompletedProcess[str]:
    """Build with two ranks, of which the second one has its own file system in `mount`."""
    # Not one that is preloaded: it would have the mounts of its server
    command = [sys.executable, "-m", "megablend", "build", str(path)]
    other = command
    if mount is not None:
        other = [
            "unshare",
            "-m",
            "sh",
            "-c",
            'mount -t tmpfs none "$0" || exit 77; exec "$@"',
            str(mount),
            *command,
        ]
    return subprocess.run(
        [str(MPIRUN), "-n", "1", *command, ":", "-n", "1", *other],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment(COLUMNS=200),
    )


@pytest.mark.slow
@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun in this environment")
@pytest.mark.parametrize("folder", MOUNTS)
def test_a_folder_that_ranks_do_not_share(tmp_path: Path, folder: str) -> None:
    sources = [
        write_source(tmp_path, 0, "parquet", documents(0, 150, 60, 5), num_files=6) | {"weight": 1}
    ]
    config: dict[str, Any] = make_config(tmp_path, sources, samples=80, order="document")
    path = tmp_path / "run.json"
    mount = tmp_path / "cache" / folder
    path.write_text(json.dumps(config))
    mount.mkdir(parents=True)
    done = build(path, mount)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user cannot mount a file system")
    assert done.returncode == 3, done.stderr
    assert re.search(MOUNTS[folder], done.stderr), done.stderr
    for remedy in (config | {"cache": str(tmp_path / "other")}, config):
        path.write_text(json.dumps(remedy))
        done = build(path, mount if remedy is not config else None)
        assert done.returncode == 0, done.stderr
        assert len(megablend.open(remedy)[79]["tokens"]) == 8
