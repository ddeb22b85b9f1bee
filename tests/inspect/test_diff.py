"""diff, against samples that are compared by what they hold: each token occurs once in the data."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import megablend
from megablend.config import load_config
from megablend.errors import ConfigError
from megablend.inspect.diff import DiffResult, find_parting
from megablend.operations.open import open_dataset
from megablend.operations.runs import open_run
from megablend.reader import Dataset
from megablend.run.plan_stages import plan_stages
from tests.inspect.test_find import make_run
from tests.runs import documents, make_config, write_source


def saved(folder: Path, name: str, config: dict[str, Any]) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def first_other_sample(a: Dataset, b: Dataset) -> int | None:
    for k in range(min(len(a), len(b))):
        if a.sample(k).tokens.tolist() != b.sample(k).tokens.tolist():
            return k
    return None


def compared(folder: Path, config: dict[str, Any], other: dict[str, Any]) -> DiffResult:
    """What `diff` says of two built configs, its parting sample checked against the samples."""
    megablend.build(other)
    found = megablend.diff(saved(folder, "a", config), saved(folder, "b", other))
    assert found.to_dict()["parts_at"] == first_other_sample(
        open_dataset(config), open_dataset(other)
    )
    ledgers = [Path(each["cache"], "runs", f"{each['run']}.json") for each in (config, other)]
    by_ledger = megablend.diff(*ledgers)
    assert {key: found.to_dict()[key] for key in found.to_dict().keys() - {"a", "b"}} == {
        key: by_ledger.to_dict()[key] for key in by_ledger.to_dict().keys() - {"a", "b"}
    }
    return found


def named(found: DiffResult) -> dict[str, tuple[Any, Any]]:
    return {each.what: (each.a, each.b) for each in found.differences}


def test_settings_that_part_runs(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    other = config | {"run": "other"}
    assert compared(tmp_path, config, other).to_dict()["parts_at"] is None
    changes: list[tuple[dict[str, Any], dict[str, Any] | set[str]]] = [
        ({"seed": 8}, {"seed": (7, 8)}),
        ({"lanes": 8}, {"lanes": (4, 8)}),
        ({"order": "row"}, {"order"}),
        ({"sequence_length": 4}, {"sequence_length": (8, 4)}),
        ({"split": "70,30,0"}, {"split"}),
    ]
    for number, (change, differing) in enumerate(changes):
        found = compared(tmp_path, config, other | {"run": f"other{number}"} | change)
        assert found.to_dict()["parts_at"] is not None
        listed = named(found)
        assert set(differing) <= listed.keys()
        if isinstance(differing, dict):
            assert all(listed[key] == value for key, value in differing.items())
        assert found.to_dict()["agrees_up_to"] == 0


def test_other_shares_and_sources(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    weights = [
        source | {"weight": weight}
        for source, weight in zip(config["sources"], (400, 301, 200), strict=True)
    ]
    found = compared(tmp_path, config, config | {"run": "weights", "sources": weights})
    assert "share of source 's1'" in named(found)
    turned = compared(
        tmp_path, config, config | {"run": "turned", "sources": config["sources"][::-1]}
    )
    assert named(turned)["sequence of sources"] == (["s0", "s1", "s2"], ["s2", "s1", "s0"])
    fewer = compared(tmp_path, config, config | {"run": "fewer", "sources": config["sources"][:2]})
    assert named(fewer)["source 's2'"] == ("present", None)


def test_a_longer_run_is_the_same_up_to_the_shorter_ones_end(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    longer = config | {"cache": str(tmp_path / "other")}
    megablend.build(longer)
    found = compared(tmp_path, config, longer | {"samples": 300})
    assert (
        found.to_dict()["parts_at"],
        found.to_dict()["samples"],
        found.to_dict()["agrees_up_to"],
    ) == (
        None,
        [200, 300],
        200,
    )
    assert named(found) == {"stage ends": ([200], [200, 300])}


def test_a_file_that_was_added_or_changed(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, split=None)
    more = tmp_path / "more"
    write_source(more, 2, "arrow", documents(2, 40, 20, 9))
    (tmp_path / "source2" / "2.arrow").write_bytes((more / "source2" / "0.arrow").read_bytes())
    found = compared(tmp_path, config, config | {"run": "added"})
    assert found.to_dict()["parts_at"] is not None
    assert "index" in named(found)


def test_versions_of_the_plan_part_where_an_epoch_ends(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, samples=600, lanes=4, shuffle_window=8)
    run = open_run(load_config(config), "train")
    ledger = run.ledger.in_version(1)
    plan = plan_stages(ledger.stages, run.data.tokens_by_index, run.data.blocks)
    old = dataclasses.replace(run, ledger=ledger, plan=plan)
    parting = find_parting(old, run)
    assert parting == first_other_sample(Dataset(old), Dataset(run))
    assert parting
    assert find_parting(run, old) == parting


def test_states_are_compared_by_their_digests(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    state = tmp_path / "state.json"
    state.write_text(json.dumps(open_dataset(config).state_dict(40)))
    path = saved(tmp_path, "a", config)
    found = megablend.diff(path, state)
    assert (found.to_dict()["differences"], found.to_dict()["agrees_up_to"]) == ([], 200)
    assert "parts_at" not in found.to_dict()
    other = saved(tmp_path, "b", config | {"seed": 9})
    found = megablend.diff(state, other)
    assert [each["what"] for each in found.to_dict()["differences"]] == ["stages"]
    assert found.to_dict()["agrees_up_to"] == 0


def test_an_amended_run_and_a_state_of_before(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    stages = [
        {"samples": 200},
        {"samples": 200, "sources": {config["sources"][0]["name"]: {"weight": 9}}},
    ]
    before = config | {"stages": stages[:1]}
    before.pop("samples")
    megablend.build(before | {"run": "amended"})
    state = tmp_path / "state.json"
    state.write_text(json.dumps(open_dataset(before | {"run": "amended"}).state_dict(40)))
    amended = before | {"run": "amended", "stages": stages}
    at = megablend.amend(amended, at=50).at
    assert 50 <= at < 200
    found = megablend.diff(saved(tmp_path, "a", amended), state)
    assert found.to_dict()["agrees_up_to"] == at
    assert megablend.diff(state, saved(tmp_path, "a", amended)).to_dict()["agrees_up_to"] == at


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path)
    path = saved(tmp_path, "a", config)
    with pytest.raises(
        ConfigError, match=r"^s3://\S+: is in an object store; give the run.s config"
    ):
        megablend.diff("s3://bucket/cache/runs/x/0000.json", path)
    with pytest.raises(
        ConfigError,
        match=r"is a folder; give a config, a run's ledger \(runs/NAME.json of a cache\)",
    ):
        megablend.diff(path, tmp_path / "cache")
    empty = saved(tmp_path, "empty", config | {"cache": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"empty.yaml: .*holds no index"):
        megablend.diff(path, empty)


def test_a_ledger_outside_its_cache_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path, 0, "arrow", documents(0, 60, 30, seed=4)) | {"weight": 1}
    config = make_config(tmp_path, [source], samples=40)
    megablend.build(config)
    ledger = tmp_path / "cache" / "runs" / "default.json"
    (tmp_path / "elsewhere" / "runs").mkdir(parents=True)
    for copy in (tmp_path / "copy.json", tmp_path / "elsewhere" / "runs" / "default.json"):
        shutil.copy(ledger, copy)
        with pytest.raises(
            ConfigError,
            match=rf"{copy}: is a run's ledger, but outside its cache; give the one inside",
        ):
            megablend.diff(ledger, copy)
    assert megablend.diff(ledger, ledger).to_dict()["parts_at"] is None
