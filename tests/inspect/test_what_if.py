"""describe before anything is built: what would be, and what is missing to say more. Nothing is committed by it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.operations.check_data import check_data
from tests.formats.writers import KINDS
from tests.runs import EOD, documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [
        write_source(tmp_path / "data", d, kind, documents(d, 60, 30, 5))
        | {"weight": 3 - 2 * d, "append_eod": EOD}
        for d, kind in enumerate(["parquet", "arrow"])
    ]
    return make_config(tmp_path, sources, samples=100, run="demo")


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_without_an_index_it_tells_what_there_is(tmp_path: Path, config: dict[str, Any]) -> None:
    found = megablend.describe(config)
    assert not found.to_dict()["committed"]
    remedy = "run `megablend index CONFIG`, which indexes the files without committing a run"
    assert found.to_dict()["note"].endswith(
        f"holds no index, so the numbers of tokens are not known: {remedy}"
    )
    first, second = found.to_dict()["files"]
    assert (first["name"], first["format"], first["files"], first["share"]) == (
        "s0",
        "parquet",
        2,
        {"weight": 3.0},
    )
    assert second["bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "data" / "source1").iterdir()
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("order", ["page", "row"])
def test_an_index_alone_says_just_what_the_build_commits(
    tmp_path: Path, config: dict[str, Any], order: str
) -> None:
    config |= {"order": order, "split": "80,20,0"}
    built = megablend.build_index(config)
    assert built.index.read == 4
    assert (built.documents is not None) == (order == "row")
    before = files(tmp_path / "cache")
    sizes: dict[str, Any] = {"micro_batch_size": 2, "data_parallel_size": 2}
    foreseen = megablend.describe(config, **sizes)
    assert files(tmp_path / "cache") == before
    assert megablend.list_runs(config) == []
    assert (foreseen.to_dict()["committed"], foreseen.to_dict()["note"]) == (
        False,
        "run 'demo' is not committed; `megablend build CONFIG` commits it",
    )
    assert megablend.build(config).index.read == 0
    committed = megablend.describe(config, **sizes)
    assert (committed.to_dict()["committed"], committed.to_dict()["note"]) == (True, None)
    for key in foreseen.to_dict().keys() - {"committed", "note"}:
        assert foreseen.to_dict()[key] == committed.to_dict()[key], key


def test_other_settings_of_a_run_are_described_and_what_refuses_them(
    config: dict[str, Any],
) -> None:
    megablend.build(config)
    longer = megablend.describe(config | {"samples": 170})
    assert (longer.to_dict()["committed"], longer.to_dict()["stages"]) == (False, [100, 170])
    assert (
        "was built for 100 samples; the figures are for 170, to which" in longer.to_dict()["note"]
    )
    assert longer.to_dict()["plan"] == megablend.build(config | {"samples": 170}).ledger.digest
    shorter = megablend.describe(config | {"samples": 60})
    assert (shorter.to_dict()["committed"], shorter.to_dict()["stages"]) == (False, [60])
    expected = "`megablend build CONFIG` refuses it: run 'demo' was built for 170 samples, but 60 are now requested"
    assert expected in shorter.to_dict()["note"]
    assert "`megablend runs reset CONFIG`" in shorter.to_dict()["note"]
    megablend.reset_run(config, "demo")  # the remedy
    assert megablend.build(config | {"samples": 60}).ledger.digest == shorter.to_dict()["plan"]
    still = megablend.describe(config | {"samples": 60})
    assert still.to_dict()["committed"]


def test_sources_that_the_index_lacks_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    one = config | {"sources": config["sources"][:1]}
    megablend.build(one)
    found = megablend.describe(config)
    assert "lacks 1 of the config's sources (the first: 's1')" in found.to_dict()["note"]
    assert [source["name"] for source in found.to_dict()["files"]] == ["s0", "s1"]
    megablend.build_index(config)  # the remedy
    assert "the config does not fit run 'demo'" in megablend.describe(config).to_dict()["note"]
    assert (
        megablend.open(one).run.ledger.index
        != megablend.describe(config).to_dict()["index"]["digest"]
    )


def test_what_cannot_be_planned_is_an_error_without_a_build(config: dict[str, Any]) -> None:
    megablend.build_index(config)
    config["sources"][1]["max_epochs"] = 0.01
    with pytest.raises(megablend.PlanError, match="max_epochs"):
        megablend.describe(config)
    config["sources"][0]["path"] = "nowhere/*.parquet"
    with pytest.raises(megablend.ConfigError, match="matches no file"):
        megablend.build_index(config)


OTHER_FILES = "has other files of source 's0' than the source's path matches"
INDEX_IT = "run `megablend index CONFIG`, which indexes the files without committing a run"


def without_second_file(config: dict[str, Any]) -> dict[str, Any]:
    """The config of another run, whose first source has one of its two files."""
    first, second = config["sources"]
    return config | {
        "run": "other",
        "sources": [first | {"path": first["path"].replace("*", "0")}, second],
    }


def files_note(config: dict[str, Any]) -> str:
    """The note of a config that no index describes; `check` and `diff` refuse it for the same reason."""
    found = megablend.describe(config)
    assert not found.to_dict()["committed"]
    assert "splits" not in found.to_dict()
    note: str = found.to_dict()["note"]
    assert note.endswith(INDEX_IT)
    reason = re.escape(note.partition(", so ")[0])
    for check in (megablend.check, check_data):
        with pytest.raises(megablend.CacheError, match=rf"{reason}; {INDEX_IT}"):
            check(config)
    return note


def test_another_config_with_other_files_is_not_described_by_their_index(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    megablend.build(config)
    other = without_second_file(config)
    note = files_note(other)
    first = f"{tmp_path}/data/source0/1.parquet is indexed, but not matched"
    assert f"{OTHER_FILES} (2 indexed, 1 matched; the first difference: {first})" in note
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    with pytest.raises(
        megablend.ConfigError, match=rf"{path}: the newest index of .* {OTHER_FILES}"
    ):
        megablend.diff(path, path)
    megablend.build_index(other)  # the remedy
    assert megablend.check(other).files == 3
    foreseen = megablend.describe(other)
    assert foreseen.to_dict()["plan"] == megablend.build(other).ledger.digest
    of_one, of_both = (
        each.to_dict()["splits"]["train"]["sources"][0]
        for each in (foreseen, megablend.describe(config))
    )
    assert of_one["tokens"] < of_both["tokens"]


def test_files_that_came_since_are_not_described_by_the_older_index(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    megablend.build_index(config)
    folder = tmp_path / "data" / "source0"
    KINDS["parquet"].write(folder / "2.parquet", documents(0, 9, 9, 1))
    assert (
        f"{OTHER_FILES} (2 indexed, 3 matched; the first difference: {folder}/2.parquet is not indexed)"
        in files_note(config)
    )


@pytest.mark.parametrize("left", [0, 1, 2])
def test_missing_and_changed_files_are_problems_before_a_run_exists(
    tmp_path: Path, config: dict[str, Any], left: int
) -> None:
    megablend.build_index(config)
    paths = [tmp_path / "data" / "source0" / f"{number}.parquet" for number in range(2)]
    for path in paths[left:]:
        path.unlink()
    if left == 2:
        KINDS["parquet"].write(paths[1], documents(0, 90, 9, 1))
    says = (
        [f"{paths[1]}: has "] if left == 2 else [f"{path}: no such file" for path in paths[left:]]
    )
    for problems in (
        megablend.describe(config).to_dict()["problems"],
        megablend.check(config).problems,
    ):
        assert len(problems) == len(says)
        assert all(
            problem.startswith(text) for problem, text in zip(problems, says, strict=True)
        ), problems


def test_files_of_another_folder_are_not_those_of_the_index(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    megablend.build_index(config)
    other = write_source(tmp_path / "more", 0, "parquet", documents(0, 20, 9, 1), num_files=3)
    config["sources"][0] |= {"path": other["path"]}
    first = f"{tmp_path}/data/source0/0.parquet is indexed, but not matched"
    assert f"{OTHER_FILES} (2 indexed, 3 matched; the first difference: {first})" in files_note(
        config
    )


def test_files_that_moved_as_a_whole_are_those_of_the_index(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    megablend.build_index(config)
    plan = megablend.describe(config).to_dict()["plan"]
    (tmp_path / "data" / "source0").rename(tmp_path / "moved")
    config["sources"][0] |= {"path": f"{tmp_path}/moved/*.parquet"}
    found = megablend.describe(config)
    assert (found.to_dict()["plan"], found.to_dict()["problems"]) == (plan, [])
    assert megablend.check(config).problems == ()
    (tmp_path / "moved").rename(tmp_path / "data" / "source0")
    # Another root, the same files
    config["sources"][0] |= {"path": f"{tmp_path}/*/source0/*.parquet"}
    assert (megablend.describe(config).to_dict()["plan"], megablend.check(config).problems) == (
        plan,
        (),
    )


def test_a_refused_config_is_planned_on_its_own_files_only(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    megablend.build(config)
    refused = config | {"samples": 60}
    assert "refuses it" in megablend.describe(refused).to_dict()["note"]
    KINDS["parquet"].write(tmp_path / "data" / "source0" / "2.parquet", documents(0, 9, 9, 1))
    assert OTHER_FILES in megablend.describe(refused).to_dict()["note"]
    assert megablend.describe(config).to_dict()["committed"]  # its ledger decides
    assert megablend.check(config).problems == ()


def test_files_that_cannot_be_read_are_left_out_as_by_a_build(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    (tmp_path / "data" / "source0" / "2.parquet").symlink_to("nowhere")
    megablend.build_index(config | {"on_unreadable": "skip"})
    assert "splits" in megablend.describe(config | {"on_unreadable": "skip"}).to_dict()
    with pytest.raises(megablend.DataError, match="a broken symbolic link"):
        megablend.describe(config)


@pytest.mark.parametrize(
    ("setting", "of_source", "lacked"),
    [
        ({"split": "90,10"}, {}, "which has no document counts for source 's0'"),
        ({"order": "document"}, {}, "which has no document counts for source 's0'"),
        ({}, {"append_eod": EOD}, "which has no document counts for source 's0'"),
        ({}, {"column": "other"}, "in which source 's0' has column None; the config has 'other'"),
        ({}, {"extra_columns": ["other"]}, "which lacks extra column 'other' of source 's0'"),
    ],
)
def test_what_the_index_lacks_of_its_files_is_named_before_a_run_exists(
    tmp_path: Path, setting: dict[str, Any], of_source: dict[str, Any], lacked: str
) -> None:
    columns = {"tokens": [[1, 2, 3, 4]] * 90, "other": [[5, 6, 7, 8]] * 90}
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    source = {"name": "s0", "path": f"{tmp_path}/*.parquet", "weight": 1}
    config = make_config(tmp_path, [source], samples=20)
    index = megablend.build_index(config).index.digest
    changed = config | setting | {"sources": [source | of_source]}
    assert f"the newest index of {tmp_path}/cache is {index}, {lacked}" in files_note(changed)
    megablend.build_index(changed)  # the remedy
    assert megablend.describe(changed).to_dict()["plan"] == megablend.build(changed).ledger.digest


def test_an_index_that_a_run_uses_decides_what_the_run_can_have(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": [[1, 2, 3, 4]] * 90}), tmp_path / "0.parquet")
    config = make_config(
        tmp_path, [{"name": "s0", "path": f"{tmp_path}/*.parquet", "weight": 1}], samples=20
    )
    megablend.build(config)
    with pytest.raises(
        megablend.PlanError, match=r"uses index \w+, which has no document counts .* another name"
    ):
        megablend.describe(config | {"split": "90,10"})
