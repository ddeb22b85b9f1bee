"""Small Arrow files, builds of them in this process, and under mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megablend.config.read_spec import ReadSpec
from megablend.distributed.base import SingleProcess
from megablend.index.build.build import BuildReport, SourceSpec, build_index
from megablend.index.tables.manifest import TABLES, dump_with_checksum, read_manifest
from tests.preloaded import python
from tests.storages import STORAGE

ROOT = Path(__file__).parent.parent.parent
DRIVER = Path(__file__).with_name("build_driver.py")
LAUNCHERS = ("PMI", "MPI_", "OMPI_", "SLURM_", "MEGABLEND_TEST_")


def documents_of(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, rng.integers(0, 12)).tolist() for _ in range(rng.integers(5, 40))]


def write(path: Path, seed: int) -> Path:
    """A file of documents_of(seed), 7 to a batch."""
    documents = documents_of(seed)
    kind = pa.list_(pa.int32())
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("tokens", kind)])
    with pa.ipc.new_file(str(path), schema) as writer:
        for start in range(0, len(documents), 7):
            writer.write_batch(
                pa.record_batch([pa.array(documents[start : start + 7], kind)], schema=schema)
            )
    return path


def spec(
    data: Path, pattern: str = "*.arrow", *, name: str = "source", documents: bool = True
) -> SourceSpec:
    return SourceSpec(
        name=name, patterns=(str(data / pattern),), read=ReadSpec(count_documents=documents)
    )


def build(cache: Path, *specs: SourceSpec, **options: Any) -> BuildReport:
    return build_index(str(cache), specs, launch=SingleProcess(), storage=STORAGE, **options)


def snapshot_bytes(cache: Path, digest: str) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in sorted((cache / "generations" / digest).iterdir())
    }


def strip_checks(folder: Path) -> None:
    """Make a snapshot one of version 0.1.0: no checksums of rows, and nothing of what the build saw of its files."""
    manifest = read_manifest(folder)
    tables = {name: entry for name, entry in manifest["tables"].items() if name in TABLES}
    (folder / "manifest.json").write_bytes(dump_with_checksum(manifest | {"tables": tables}))
    for path in folder.iterdir():
        if path.name not in (*TABLES, "manifest.json", "roots.json"):
            path.unlink()
    roots = json.loads((folder / "roots.json").read_bytes())
    roots.pop("checksum", None)
    (folder / "roots.json").write_text(json.dumps(roots, sort_keys=True, indent=1))


def driver(num_ranks: int, *args: object) -> list[str]:
    """The command of a build."""
    launcher = (
        []
        if num_ranks == 0
        else [str(Path(sys.executable).with_name("mpirun")), "-n", str(num_ranks)]
    )
    return [*launcher, *python(), str(DRIVER), *map(str, args)]


def wait_for_end(pids: Path) -> None:
    """Until the processes of a build, whose ids are in a folder, have ended: soon after their launcher has."""
    places = [Path("/proc", path.read_text()) for path in pids.iterdir() if path.name.isdigit()]
    while any(place.exists() for place in places):
        time.sleep(0.005)


def environment(**extra: object) -> dict[str, str]:
    """The environment without what a launcher of the tests themselves may have left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**kept, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in extra.items()}}


def run(command: list[str], **extra: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        env=environment(**extra),
        check=False,
        cwd=ROOT,
    )
