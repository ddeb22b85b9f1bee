"""Ranks that were given different settings all get an error that names these and the ranks. Ranks are threads here."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.distributed.fail_together import FailTogether
from megablend.distributed.same_settings import check_same_settings
from megablend.errors import ConfigError
from megablend.operations import build as building
from megablend.operations.build import build, build_index
from tests.cli.test_megatron_cache import environment, flags
from tests.megatron.meeting import on_ranks
from tests.pairs import write_pair
from tests.preloaded import python

OTHER = (
    "import megablend; megablend.__version__ = '0.0'; from megablend.cli.main import main; main()"
)
OTHER_VERSION = f"megablend is {megablend.__version__} on rank 0, 0.0 on rank 1; start all"
SAME: dict[str, Any] = {
    "seed": 1,
    "sources": {"train": [{"name": "a", "weight": Fraction(1, 3), "path": ("/a", "/b")}]},
}


def compare(*settings: dict[str, Any]) -> list[str]:
    """What the ranks raise."""
    found = on_ranks(
        len(settings), lambda launch: check_same_settings(launch, settings[launch.rank])
    )
    assert all(each is None or isinstance(each, ConfigError) for each in found)
    return ["" if each is None else str(each) for each in found]


def test_same_settings_are_accepted() -> None:
    assert compare(SAME) == [""]
    assert compare(*[SAME] * 5) == [""] * 5
    assert compare({"a": [1], "b": None}, {"a": (1,)}) == ["", ""]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [SAME, {**SAME, "seed": 2}, SAME],
            r"settings: seed is 1 on rank 0, 2 on rank 1; start all ranks",
        ),
        (
            [
                SAME,
                *[
                    {
                        "seed": 1,
                        "sources": {
                            "train": [{"name": "a", "weight": Fraction(1, 3), "path": ["/a"]}]
                        },
                    }
                ]
                * 3,
            ],
            r"settings: sources\.train\[0\]\.path\[1\] is /b on rank 0, not set on rank 1; start",
        ),
        (
            [{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, {}],
            r"c is 1 on rank 0, not set on rank 1; start",
        ),
        (
            [{}, {}, {"a": 1}, {"a": 2, "b": 3}],
            r"a is not set on rank 0, 1 on rank 2; b is not set on rank 0, 3 on rank 3; start",
        ),
        ([{"a": "x" * 200}, {"a": "y"}], r"a is x{100} on rank 0, y on rank 1;"),
    ],
)
def test_different_settings_are_named_on_all_ranks(
    settings: list[dict[str, Any]], message: str
) -> None:
    found = compare(*settings)
    assert len(set(found)) == 1
    with pytest.raises(ConfigError, match=f"^the ranks have different .*{message}"):
        raise ConfigError(found[0])


@pytest.mark.parametrize("what", [build, build_index])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, r"seed is 1234 on rank 0, 7 on rank 1"),
        (
            {"sources": "other"},
            r"sources\.train\[0\]\.path\[0\] is .*/data/a\.parquet on rank 0, .*/data/b\.parquet on rank 1",
        ),
        ({"memory": "1GiB", "warnings": {"max_epochs": None}}, None),
    ],
)
def test_ranks_with_different_configs(
    tmp_path: Path, what: Any, change: dict[str, Any], message: str | None
) -> None:
    (tmp_path / "data").mkdir()
    for name in "ab":
        pq.write_table(pa.table({"ids": [[1, 2, 3]] * 20}), tmp_path / "data" / f"{name}.parquet")
    first: dict[str, Any] = {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 4,
        "samples": 10,
        "sources": [{"name": "s", "path": str(tmp_path / "data" / "a.parquet")}],
    }
    second = {**first, **change}
    if "sources" in change:
        second["sources"] = [{"name": "s", "path": str(tmp_path / "data" / "b.parquet")}]

    def work(launch: FailTogether) -> Any:
        return what([first, second][launch.rank], launch=launch)

    found = on_ranks(2, work)
    if message is None:
        assert [each.ranks for each in found] == [2, 2]
        return
    for each in found:
        with pytest.raises(ConfigError, match=message):
            raise each
    assert not (tmp_path / "cache").exists()
    assert [each.ranks for each in on_ranks(2, lambda launch: what(first, launch=launch))] == [2, 2]


def test_ranks_of_which_one_makes_checksums(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[1, 2, 3]] * 20}), tmp_path / "a.parquet")
    config: dict[str, Any] = {"cache": str(tmp_path / "cache"), "sequence_length": 4, "samples": 10}
    config["sources"] = [{"name": "s", "path": str(tmp_path / "a.parquet")}]
    for each in on_ranks(
        2, lambda launch: build(config, launch=launch, checksums=launch.rank == 1)
    ):
        with pytest.raises(ConfigError, match="--checksums is False on rank 0, True on rank 1"):
            raise each


@pytest.mark.parametrize("make", [build, build_index])
def test_a_rank_that_fails_between_two_phases(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"ids": [[1, 2, 3]] * 20}), tmp_path / "a.parquet")
    config: dict[str, Any] = {"cache": str(tmp_path / "cache"), "sequence_length": 4, "samples": 10}
    config["sources"] = [{"name": "s", "path": str(tmp_path / "a.parquet")}]
    index_files = vars(building)["index_files"]

    def index(*args: Any, launch: FailTogether, **settings: Any) -> Any:
        if launch.rank == 1:
            raise RecursionError("between")
        return index_files(*args, launch=launch, **settings)

    monkeypatch.setitem(vars(building), "index_files", index)
    for each in on_ranks(2, lambda launch: make(config, launch=launch)):
        assert isinstance(each, RecursionError)


def launch_each(*commands: list[str], code: int = 2) -> str:
    """What programs that start with one another, each on one rank, write to stderr; all exit with the same code.
    A command is megablend's, or Python's with `-c`."""
    parts = [
        part
        for words in commands
        for part in (
            ":",
            "-n",
            "1",
            *python(),
            *(words if "-c" in words else ["-m", "megablend", *words]),
        )
    ]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("mpirun")), *parts[1:]],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment(),
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.long
def test_builds_that_mpirun_started_with_different_configs(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[1, 2, 3]] * 20}), tmp_path / "a.parquet")
    for seed in (1, 2):
        config = {"cache": "cache", "sequence_length": 4, "samples": 10, "seed": seed}
        config["sources"] = [{"name": "s", "path": "a.parquet"}]
        (tmp_path / f"{seed}.json").write_text(json.dumps(config))
    found = launch_each(*(["build", str(tmp_path / f"{seed}.json")] for seed in (1, 1, 2)))
    says = "rank 0: the ranks have different settings: seed is 1 on rank 0, 2 on rank 2; start all ranks with the same"
    assert says in found
    same = ["build", str(tmp_path / "1.json")]
    found = launch_each(same, [*same, "--dry-run"])
    assert "--dry-run is False on rank 0, True on rank 1" in found
    found = launch_each(same, ["index", *same[1:]])
    assert "command is build on rank 0, index on rank 1" in found
    assert OTHER_VERSION in launch_each(same, ["-c", OTHER, *same])
    assert not (tmp_path / "cache").exists()
    launch_each(*[["build", str(tmp_path / "1.json")]] * 3, code=0)


@pytest.mark.long
def test_caches_of_megatron_that_mpirun_started_with_different_flags(tmp_path: Path) -> None:
    data = ["--data-path", write_pair(tmp_path / "a", [5] * 50), "--split", "8,1,1"]
    found = launch_each(
        *(["megatron-cache", *flags(tmp_path / "cache", *data, "--seed", seed)] for seed in (1, 2))
    )
    says = "the ranks have different settings: seed is 1 on rank 0, 2 on rank 1; start all ranks with the same config"
    assert says in found
    same = ["megatron-cache", *flags(tmp_path / "cache", *data)]
    assert "dry_run is False on rank 0, True on rank 1" in launch_each(same, [*same, "--dry-run"])
    assert OTHER_VERSION in launch_each(same, ["-c", OTHER, *same])
    assert not (tmp_path / "cache").exists()
    launch_each(*[["megatron-cache", *flags(tmp_path / "cache", *data, "--seed", 1)]] * 2, code=0)
