from __future__ import annotations

import json
from pathlib import Path

import pytest

from megablend.distributed.base import SingleProcess, exit_code
from megablend.distributed.find_job import program_launch
from megablend.distributed.launch import detect, detect_launcher
from megablend.errors import CacheError, LaunchError
from tests.index.index_data import driver, run, write

pytestmark = pytest.mark.long  # processes are started under mpirun


@pytest.mark.parametrize(
    ("environ", "variable", "size"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "1"}, "OMPI_COMM_WORLD_SIZE", 4),
        ({"PMI_SIZE": "3", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}, "PMI_SIZE", 3),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, "SLURM_NTASKS", 8),
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_STEP_NUM_TASKS",
            2,
        ),
        ({"MPI_LOCALNRANKS": "2"}, "MPI_LOCALNRANKS", 2),
        ({"PMIX_RANK": "2"}, "PMIX_RANK", 3),
    ],
)
def test_the_launcher_that_is_nearest_counts(
    environ: dict[str, str], variable: str, size: int
) -> None:
    started = detect_launcher(environ)
    assert started is not None
    assert (started.variable, started.size) == (variable, size)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "5"},
        {"PMI_SIZE": "1"},
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "TORCHELASTIC_RUN_ID": "x"},
        {"PMI_SIZE": "2", "PMI_FD": "99999", "TORCHELASTIC_RUN_ID": "x"},
    ],
)
def test_a_shell_or_a_batch_script_or_one_rank_is_one_process(environ: dict[str, str]) -> None:
    assert isinstance(detect(environ), SingleProcess)


def test_a_count_that_is_no_number_is_refused() -> None:
    with pytest.raises(LaunchError, match="PMI_SIZE: expected an integer, got 'many'"):
        detect_launcher({"PMI_SIZE": "many"})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "many"}, "^WORLD_SIZE: expected an integer, got 'many'"),
        ({"WORLD_SIZE": ""}, "^WORLD_SIZE: expected an integer, got ''"),
        ({"WORLD_SIZE": "2"}, "^RANK is not set, but other variables of a launcher are"),
    ],
)
def test_a_count_of_torchrun_that_is_no_number_is_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=message), program_launch():
        pass


def test_one_process_raises_its_error() -> None:
    with pytest.raises(CacheError, match="full"):
        SingleProcess().abort(CacheError("full"))


def test_exit_codes() -> None:
    assert [
        exit_code(error)
        for error in (CacheError(""), LaunchError(""), KeyboardInterrupt(), KeyError())
    ] == [
        3,
        2,
        130,
        70,
    ]


def test_one_process_does_not_import_mpi(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", 1)
    for num_ranks in (0, 1):
        result = run(driver(num_ranks, tmp_path / "cache", f"s={tmp_path}/*.arrow"))
        assert result.returncode == 0, result.stderr
        assert not json.loads(result.stdout)["mpi"]


@pytest.mark.parametrize(
    ("variable", "problem"), [("OMPI_COMM_WORLD_SIZE", ""), ("PMI_SIZE", "MPI sees 1: ")]
)
def test_a_launcher_of_another_mpi_is_refused(variable: str, problem: str) -> None:
    check = "from megablend.distributed.launch import detect; detect()"
    result = run([*driver(0)[:1], "-c", check], **{variable: 4})
    assert result.returncode != 0
    expected = f"started 4 processes ({variable}) but {problem}mpi4py is bound to another MPI library (MPICH"
    assert expected in result.stderr


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "but MPI sees 1: "),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1.0"}, "but "),
    ],
)
def test_srun_without_what_the_mpi_library_needs_is_refused(
    variables: dict[str, str], problem: str
) -> None:
    """As `srun --mpi=none` and `srun --mpi=pmix` start a process whose MPI library is MPICH without PMIx."""
    check = "from megablend.distributed.launch import detect; detect()"
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
    result = run([*driver(0)[:1], "-c", check], **step, **variables)
    expected = f"srun started 4 processes (SLURM_STEP_NUM_TASKS) {problem}mpi4py's MPI library (MPICH Version: "
    assert expected in result.stderr
    assert "needs `srun --mpi=pmi2` (" in result.stderr


def test_a_launcher_without_mpi4py_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py')")
    check = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from megablend.distributed.launch import detect; detect()"
    result = run([*driver(0)[:1], "-c", check], PMI_SIZE=4)
    assert "MPI cannot be loaded" in result.stderr
    assert "pip install 'megablend[mpi]'" in result.stderr


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [("data", 3, "at byte 17: is truncated"), ("bug", 70, "nothing")],
)
def test_an_error_on_one_rank_ends_all(
    tmp_path: Path, rank: int, failure: str, code: int, message: str
) -> None:
    for i in range(6):
        write(tmp_path / f"{i}.arrow", i)
    result = run(
        driver(3, tmp_path / "cache", f"s={tmp_path}/*.arrow"),
        MEGABLEND_TEST_FAIL=f"{rank}:{failure}",
    )
    assert result.returncode == code
    assert result.stderr.count(f"rank {rank}: ") == 1
    assert message in result.stderr
    assert ("Traceback" in result.stderr) == (failure == "bug")


def test_an_error_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    result = run(driver(4, tmp_path / "cache", f"s={tmp_path}/*.arrow"))
    assert result.returncode == 2
    assert result.stderr.count("matches no file") == 1


def test_an_error_that_cannot_be_printed_ends_all() -> None:
    use = (
        "import sys; from megablend.distributed.launch import detect; from megablend.errors import CacheError\n"
        "launch = detect()\n"
        "if launch.rank == 0: launch.barrier()\n"
        "sys.stderr = open('/dev/full', 'w')\n"
        "launch.abort(CacheError('full'))"
    )
    result = run(["timeout", "60", *driver(2)[:-1], "-c", use])
    assert result.returncode == 3, result.stderr


def test_one_process_needs_no_mpi4py(tmp_path: Path) -> None:
    """It comes with the extras `mpi` and `mpich`; without it all works but builds by several MPI ranks."""
    write(tmp_path / "0.arrow", 0)
    config = {"cache": str(tmp_path / "cache"), "sequence_length": 4, "samples": 8}
    config["sources"] = [{"name": "s", "path": f"{tmp_path}/*.arrow", "weight": 1}]
    use = (
        f"import sys; sys.modules['mpi4py'] = None; import megablend; config = {config!r}; megablend.build(config); "
        "print(len(megablend.open(config)[7]['tokens']), megablend.describe(config).committed)"
    )
    result = run([*driver(0)[:1], "-c", use])
    assert result.stdout.split() == ["4", "True"], result.stderr
    project = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert "mpi4py" not in project.partition("[project.optional-dependencies]")[0]
