"""describe before anything is built: what would be, and what is missing to say more. Nothing is committed by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megablend
from tests.runs import EOD, documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [
        write_source(tmp_path / "data", d, kind, documents(d, 60, 30, 5)) | {"weight": 3 - 2 * d, "append_eod": EOD}
        for d, kind in enumerate(["parquet", "arrow"])
    ]
    return make_config(tmp_path, sources, samples=100, run="demo")


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_without_an_index_it_tells_what_there_is(tmp_path: Path, config: dict[str, Any]) -> None:
    found = megablend.describe(config)
    assert not found["committed"]
    remedy = "`megablend index CONFIG` indexes the files and commits no run"
    assert found["note"].endswith(f"holds no index, so the numbers of tokens are not known: {remedy}")
    first, second = found["files"]
    assert (first["name"], first["format"], first["files"], first["share"]) == ("s0", "parquet", 2, {"weight": 3.0})
    assert second["bytes"] == sum(path.stat().st_size for path in (tmp_path / "data" / "source1").iterdir())
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("order", ["page", "row"])
def test_an_index_alone_says_just_what_the_build_commits(tmp_path: Path, config: dict[str, Any], order: str) -> None:
    config |= {"order": order, "split": "80,20,0"}
    built = megablend.build_index(config)
    assert built.index.read == 4
    assert (built.documents is not None) == (order == "row")
    before = files(tmp_path / "cache")
    sizes: dict[str, Any] = {"micro_batch_size": 2, "data_parallel_size": 2}
    foreseen = megablend.describe(config, **sizes)
    assert files(tmp_path / "cache") == before
    assert megablend.list_runs(config) == []
    assert (foreseen["committed"], foreseen["note"]) == (
        False,
        "run 'demo' is not committed; `megablend build CONFIG` commits it",
    )
    assert megablend.build(config).index.read == 0
    committed = megablend.describe(config, **sizes)
    assert (committed["committed"], committed["note"]) == (True, None)
    for key in foreseen.keys() - {"committed", "note", "opening_seconds"}:
        assert foreseen[key] == committed[key], key


def test_other_settings_of_a_run_are_described_and_what_refuses_them(config: dict[str, Any]) -> None:
    megablend.build(config)
    longer = megablend.describe(config | {"samples": 170})
    assert (longer["committed"], longer["stages"]) == (False, [100, 170])
    assert "is committed to 100 samples; `megablend build CONFIG` lengthens it to 170" in longer["note"]
    assert longer["plan"] == megablend.build(config | {"samples": 170}).ledger.digest
    shorter = megablend.describe(config | {"samples": 60})
    assert (shorter["committed"], shorter["stages"]) == (False, [60])
    expected = "`megablend build CONFIG` refuses it: run 'demo' was built for 170 samples, now 60 are requested"
    assert expected in shorter["note"]
    assert "`megablend runs reset CONFIG`" in shorter["note"]
    megablend.reset_run(config, "demo")  # the remedy
    assert megablend.build(config | {"samples": 60}).ledger.digest == shorter["plan"]
    still = megablend.describe(config | {"samples": 60})
    assert still["committed"]


def test_sources_that_the_index_lacks_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    one = config | {"sources": config["sources"][:1]}
    megablend.build(one)
    found = megablend.describe(config)
    assert "lacks 1 of the config's sources (the first: 's1')" in found["note"]
    assert [source["name"] for source in found["files"]] == ["s0", "s1"]
    megablend.build_index(config)  # the remedy
    assert "this is not what run 'demo' is committed to" in megablend.describe(config)["note"]
    assert megablend.open(one).run.ledger.index != megablend.describe(config)["index"]["digest"]


def test_what_cannot_be_planned_is_an_error_without_a_build(config: dict[str, Any]) -> None:
    megablend.build_index(config)
    config["sources"][1]["max_epochs"] = 0.01
    with pytest.raises(megablend.PlanError, match="max_epochs"):
        megablend.describe(config)
    config["sources"][0]["path"] = "nowhere/*.parquet"
    with pytest.raises(megablend.ConfigError, match="matches no file"):
        megablend.build_index(config)
