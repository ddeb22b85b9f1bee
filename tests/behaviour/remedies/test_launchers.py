"""Remedies of mpirun, torchrun and accelerate: real processes that do as the messages say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from tests.behaviour.project import Project
from tests.pairs import write_pair
from tests.preloaded import python

ROOT = Path(__file__).parents[3]
LAUNCHERS = ("PMI", "MPI_", "OMPI_", "SLURM_", "TORCHELASTIC", "WORLD_SIZE", "RANK", "LOCAL_RANK")
MPIRUN = Path(sys.executable).with_name("mpirun")
SLOW = pytest.mark.slow


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return subprocess.run(
        command,
        env=environ | variables | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=ROOT,
    )


def build(project: Project) -> list[str]:
    return [*python(), "-m", "megablend", "build", str(project.path)]


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun in this environment")
def test_a_launcher_of_another_mpi(tmp_path: Path) -> None:
    """As Open MPI's mpirun starts it, where mpi4py is bound to MPICH."""
    project = Project(tmp_path)
    done = run(build(project), OMPI_COMM_WORLD_SIZE="2")
    assert done.returncode == 2
    says = (
        r"Open MPI's mpirun started 2 processes .* another MPI library \(MPICH.*\); start the job with that "
        r"library's own mpirun"
    )
    assert re.search(says, done.stderr), done.stderr
    project.add(1)
    done = run([str(MPIRUN), "-n", "2", *build(project)], COLUMNS="200")  # which is that library's
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert row.split("│")[8].strip() == "2", "the ranks of the build"


def test_a_count_of_processes_that_is_no_number(tmp_path: Path) -> None:
    project = Project(tmp_path)
    done = run(build(project), PMI_SIZE="many")
    assert done.returncode == 2
    named = re.search(
        r"(\w+): expected an integer, got 'many': unset it, or restart the job", done.stderr
    )
    assert named, done.stderr
    done = run(["env", "-u", named[1], *build(project)], PMI_SIZE="many")
    assert done.returncode == 0, done.stderr


def test_a_launcher_without_mpi(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py')")
    without = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run(build(project), PMI_SIZE="2", **without)
    assert done.returncode == 2
    assert (
        "or together with MPICH (`pip install 'megablend[mpich]'`), or start a single process"
        in done.stderr
    )
    done = run(build(project), **without)  # "start one process alone"
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes of a job of torchrun found, and what each would read of the run."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("launched")
    project = Project(folder, samples=96)
    prefix = write_pair(folder / "data" / "x", np.full(400, 40))
    worker = str(Path(__file__).with_name("launched_worker.py"))
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    out = ["--redirects", "3", "--log-dir", str(folder / "logs")]
    done = run([*launcher, *out, worker, str(project.path), str(folder / "megatron"), prefix])
    logs = {path.parent.name: path for path in (folder / "logs").rglob("stdout.log")}
    assert done.returncode == 0, (
        done.stderr,
        [path.read_text() for path in (folder / "logs").rglob("*.log")],
    )
    first = [tokens[0] for tokens in project.tokens]
    found = [json.loads(logs[rank].read_text().splitlines()[-1]) for rank in ("0", "1")]
    expected = [[first[i : i + 4] for i in range(4 * rank, len(first), 8)] for rank in (0, 1)]
    return [each | {"expected": batches} for each, batches in zip(found, expected, strict=True)]


def reads_its_part(found: dict[str, Any], name: str) -> None:
    assert len(found["expected"]) == 12
    assert found[name] == found["expected"]


@SLOW
def test_a_process_group_that_is_not_there(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["cache before"] == (
            "torchrun started 2 processes (WORLD_SIZE), but torch.distributed is not initialized: call "
            "torch.distributed.init_process_group first"
        )
        assert found["cache after"] > 0


@SLOW
def test_a_loader_in_a_job_of_two(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert (
            "pass data_parallel_rank= and data_parallel_size=, or data_parallel_group="
            in found["no rank"]
        )
        reads_its_part(found, "ranks")
        reads_its_part(found, "group")


@SLOW
def test_accelerate_that_would_drop_half(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert (
            "1 of 2 batches would be dropped; use megablend.Loader, which accelerate leaves unchanged, or do not pass"
            in (found["prepared sampler"])
        )
        reads_its_part(found, "prepared loader")  # "use megablend.Loader"
        reads_its_part(found, "sampler")  # "do not pass this DataLoader to prepare"


def test_a_loader_whose_batches_another_took(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    project = Project(tmp_path, samples=96)

    def loader(workers: int) -> Any:
        return megablend.Loader(
            megablend.open(str(project.path)), micro_batch_size=4, num_workers=workers
        )

    taken = loader(2)
    next(iter(accelerate.skip_first_batches(taken, 3)))
    with pytest.raises(
        megablend.StateError, match=r"load the Loader's state_dict .*, or use num_workers=0"
    ) as caught:
        taken.state_dict()
    assert "with Trainer: ignore_data_skip=True" in str(caught.value)
    alone = loader(0)
    next(iter(accelerate.skip_first_batches(alone, 3)))
    state = alone.state_dict()  # "use num_workers=0"
    assert state["consumed_samples"] == 16
    taken.load_state_dict(state)  # "load the Loader's state_dict"
    first = next(iter(taken))["tokens"][0].tolist()
    assert first == project.tokens[16]
    assert taken.state_dict()["consumed_samples"] == 20
