"""Which rank a loader reads for: given, or taken from a group; in a job of several processes never silently rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.reader.ranks import resolve_rank
from tests.runs import documents, make_config, write_source
from tests.torch_ranks import run_ranks

BOTH = "data_parallel_rank and data_parallel_size are missing, and this process is one of"


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    config = make_config(
        tmp_path, [write_source(tmp_path, 0, "arrow", documents(0, 60, 30, seed=4))], samples=40
    )
    config["sources"][0]["weight"] = 1
    megablend.build(config)
    return config


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"WORLD_SIZE": "8"}, r"8 \(WORLD_SIZE\)"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"2 \(OMPI_COMM_WORLD_SIZE\)"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "16"}, r"16 \(SLURM_NTASKS\)"),
        ({"PMIX_RANK": "3"}, r"4 or more \(PMIX_RANK\)"),
    ],
    ids=str,
)
def test_in_a_job_of_several_processes_both_are_named(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: str
) -> None:
    dataset = megablend.open(config)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for make in (megablend.Loader, megablend.PretrainingSampler):
        with pytest.raises(megablend.ConfigError, match=f"{BOTH} {job}, .*or data_parallel_group="):
            make(dataset, micro_batch_size=4)
    with pytest.raises(
        megablend.ConfigError, match="found data_parallel_size 2 without data_parallel_rank; pass"
    ):
        megablend.Loader(dataset, micro_batch_size=4, data_parallel_size=2)
    with pytest.raises(
        megablend.ConfigError,
        match=f"data_parallel_size is missing, and this process is one of {job}",
    ):
        megablend.Loader(dataset, micro_batch_size=4, data_parallel_rank=0)
    assert (
        megablend.Loader(
            dataset, micro_batch_size=4, data_parallel_size=1
        ).sampler.data_parallel_rank
        == 0
    )
    loader = megablend.Loader(
        dataset, micro_batch_size=4, data_parallel_rank=1, data_parallel_size=2
    )
    assert next(iter(loader.sampler)) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "variables", [{}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "16"}, {"PMI_SIZE": "1"}], ids=str
)
def test_a_process_alone_is_rank_0_of_1(variables: dict[str, str]) -> None:
    assert resolve_rank(None, None, None, variables) == (0, 1)


def test_a_size_needs_a_rank_everywhere() -> None:
    with pytest.raises(
        megablend.ConfigError, match="found data_parallel_size 2 without data_parallel_rank"
    ):
        resolve_rank(None, 2, None, {})


def test_groups_and_meshes_give_both_where_remedies_are_followed(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    outputs = run_ranks(2, str(Path(__file__).with_name("ranks_worker.py")), str(path))
    for number, out in enumerate(outputs):
        found = json.loads(out.splitlines()[-1])
        mine = [number * 4 + i for i in range(4)]
        assert [found[name] for name in ("world", "dp", "flat")] == [mine, mine, mine]
        # Ranks that read the same
        assert [found[name] for name in ("given", "tp")] == [[0, 1, 2, 3], [0, 1, 2, 3]]
        assert f"{BOTH} 2 (WORLD_SIZE)" in found["before"]
        assert f"{BOTH} 2 (torch.distributed)" in found["missing"]
        assert (
            "found a DeviceMesh of 2 dimensions ('dp', 'tp'), expected one dimension of it"
            in found["whole"]
        )
        assert "this process is not in the group" in found["other"]
        assert "found together with data_parallel_rank or data_parallel_size" in found["both"]
        assert (
            "found str, expected a torch.distributed.ProcessGroup or a DeviceMesh" in found["wrong"]
        )


@pytest.mark.parametrize(
    "variables",
    [{"WORLD_SIZE": "2"}, {"PMI_SIZE": "2"}, {"OMPI_COMM_WORLD_SIZE": "2"}],
    ids=lambda each: next(iter(each)),
)
def test_a_job_of_fewer_processes_than_ranks_is_refused(variables: dict[str, str]) -> None:
    says = r"found data_parallel_size 4, expected at most 2: this job has 2 processes .*never be read.*`replicas=`"
    with pytest.raises(megablend.ConfigError, match=says):
        resolve_rank(1, 4, None, variables)
    assert resolve_rank(1, 2, None, variables) == (1, 2)
    assert resolve_rank(0, 1, None, variables) == (0, 1)  # both read the same
    # "say how many jobs there are"
    assert resolve_rank(3, 4, None, variables, replicas=2) == (3, 4)
    with pytest.raises(
        megablend.ConfigError, match=r"expected at most 4: .* and 2 jobs make up the run"
    ):
        resolve_rank(3, 5, None, variables, replicas=2)
    with pytest.raises(megablend.ConfigError, match="found data_parallel_rank 2, expected 0 to 1"):
        resolve_rank(2, 2, None, variables)


def test_a_size_that_does_not_divide_the_job_is_warned_of(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(
        RuntimeWarning, match="data_parallel_size 3 does not divide the 4 processes of the job"
    ):
        megablend.Loader(
            megablend.open(config), micro_batch_size=2, data_parallel_rank=0, data_parallel_size=3
        )
    loader = megablend.Loader(
        megablend.open(config),
        micro_batch_size=2,
        data_parallel_rank=7,
        data_parallel_size=8,
        replicas=2,
    )
    assert next(iter(loader.sampler)) == [14, 15]


def test_a_process_alone_may_play_any_rank() -> None:
    assert resolve_rank(6, 8, None, {}) == (6, 8)
    with pytest.raises(megablend.ConfigError, match="found data_parallel_rank 8, expected 0 to 7"):
        resolve_rank(8, 8, None, {})
