"""`torchrun -m megablend build`: its processes share the work; one that is started alone is told how; errors, as under
mpirun, are one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import megablend
from tests.index.index_data import driver, run
from tests.runs import documents, make_config, write_source

pytest.importorskip("torch")
pytestmark = pytest.mark.long
WORKER = Path(__file__).with_name("torchrun_worker.py")
ROOT = str(Path(__file__).parents[2])
RANKS = 4
Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sources = [
        write_source(tmp_path, i, "parquet", documents(i, 60, 40, 3), num_files=4) | {"weight": 1}
        for i in range(2)
    ]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(make_config(tmp_path, sources, samples=64)))
    return path


def torchrun(*args: object, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    started = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
    ]
    return subprocess.run(
        [*started, f"--max-restarts={restarts}", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_all_ranks_share_the_work(config: Path) -> None:
    done = torchrun("-m", "megablend", "build", config)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run 'default' is new: 64 samples") == 1  # one build, told once
    (row,) = (line.split("│") for line in done.stdout.splitlines() if line.startswith("│ 8"))
    assert row[1:4] == [" 8     ", "    8 ", "      0 "]
    assert int(row[8]) == RANKS
    assert len(megablend.open(config)) == 64


def test_torchrun_that_srun_started_on_each_node(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes are those of torchrun, whatever the tasks of the step are: the common way to train under Slurm."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    done = torchrun("-m", "megablend", "build", config)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run 'default' is new: 64 samples") == 1


def test_a_restarted_job_meets_again(config: Path) -> None:
    done = torchrun(WORKER, "restart", config, restarts=1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("samples, plan ") == 1
    assert len(megablend.open(config)) == 64


def test_one_rank_alone_is_told_who_is_missing(config: Path) -> None:
    done = torchrun(WORKER, "first", config)
    assert done.returncode != 0
    assert "ranks 1, 2, 3 did not run this command within 3 s; run it on all ranks" in done.stderr
    assert not Path(json.loads(config.read_text())["cache"]).exists()


def test_one_rank_may_build_by_the_function(config: Path) -> None:
    done = torchrun(WORKER, "api", config)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["built", "8"]


def mpirun(*args: object) -> subprocess.CompletedProcess[str]:
    return run(driver(RANKS)[:-1] + [str(arg) for arg in args])


@pytest.mark.parametrize("launch", [mpirun, torchrun])
def test_an_error_of_all_ranks_is_one_json_object(launch: Launch, config: Path) -> None:
    config.write_text(config.read_text().replace(".parquet", ".missing"))
    for args in (["build", "--dry-run"], ["build"]):
        done = launch("-m", "megablend", *args, config, "--json")
        error = json.loads(done.stdout)["error"]
        assert (error["kind"], error["exit_code"]) == ("ConfigError", 2)
        assert "matches no file" in error["message"]


@pytest.mark.parametrize("launch", [mpirun, torchrun])
def test_an_error_of_one_rank_is_one_json_object(launch: Launch, config: Path) -> None:
    done = launch(WORKER, "one", config)
    assert json.loads(done.stdout) == {
        "error": {
            "kind": "MissingFileError",
            "message": "/x: no such file",
            "exit_code": 3,
            "rank": 1,
        }
    }
    named = "rank 1: /x: no such file" if launch is mpirun else "(raised on rank 1 of 4)"
    assert named in done.stderr


def test_a_rank_that_exits_ends_the_others(config: Path) -> None:
    done = mpirun(WORKER, "exit", config)
    assert done.returncode == 70
    assert "rank 1: 5" in done.stderr


def test_a_dry_run_is_reported_once(config: Path) -> None:
    done = torchrun("-m", "megablend", "build", config, "--dry-run", "--json")
    assert len(json.loads(done.stdout)["sources"]) == 2


@pytest.mark.parametrize("launch", [mpirun, torchrun])
def test_a_wrong_option_is_one_json_object(launch: Launch, config: Path) -> None:
    done = launch("-m", "megablend", "describe", config, "--al", "--json")
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("UsageError", 2)


def test_a_wrong_launcher_is_one_json_object(config: Path) -> None:
    command = [*driver(2)[:-1], "-m", "megablend", "build", str(config), "--json"]
    done = run(command, OMPI_COMM_WORLD_SIZE=2)
    assert json.loads(done.stdout)["error"]["kind"] == "LaunchError"
    assert done.returncode == 2


def test_records_are_changed_once(config: Path) -> None:
    """By the first rank; the others wait for it."""
    megablend.build(config)
    for says, *args in (
        ("0 indexes", "gc"),
        ("run 'default' is now 'new'", "runs", "rename", "default", "new"),
    ):
        args.insert(2 if args[0] == "runs" else 1, str(config))
        done = mpirun("-m", "megablend", *args)
        assert (done.returncode, done.stdout.count(says)) == (0, 1), done.stderr


@pytest.mark.parametrize("how", ["skip", "every"])
def test_samples_are_skipped_once(how: str, config: Path) -> None:
    """By all ranks, or by one alone, which does not wait for the others."""
    megablend.build(config)
    done = torchrun(WORKER, how, config)
    assert done.returncode == 0, done.stderr
    assert megablend.open(config).skips.ranges == ((0, 4),)


@pytest.mark.parametrize("launch", [mpirun, torchrun])
def test_records_that_cannot_be_changed(launch: Launch, config: Path) -> None:
    """All ranks end as the first one does, which alone says why."""
    megablend.build(config)
    done = launch("-m", "megablend", "runs", "remove", config, "none", "--json")
    assert json.loads(done.stdout)["error"]["exit_code"] == 3
    assert done.stderr.count("contains no run 'none'") == 1
    assert done.returncode == (3 if launch is mpirun else 1)


def test_ranks_that_would_change_different_records(config: Path) -> None:
    done = mpirun(WORKER, "two", config)
    assert done.returncode == 2
    assert done.stderr.count("the ranks have different settings: older_than is") == 1


@pytest.mark.parametrize("launch", [mpirun, torchrun])
def test_one_rank_alone_changes_records(launch: Launch, config: Path) -> None:
    """As a program does that starts the command on one rank."""
    megablend.build(config)
    done = launch(WORKER, "alone", config)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 indexes kept") == 1
