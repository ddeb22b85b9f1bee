"""Remedies where another process changes a run meanwhile, or an argument or a file is not what a command needs."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import megablend
from megablend.api import manage_runs
from megablend.cli.main import cli
from megablend.errors import CacheError, ConfigError, PlanError
from megablend.index.manifest import dump_with_checksum, read_manifest, read_roots
from tests.api.test_repairs import Project
from tests.runs import documents, make_config, write_source


def call(*words: object) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A run of one stage, followed by another one that is not committed yet; `next.json` has both."""
    sources = [write_source(tmp_path, 0, "arrow", documents(0, 150, 60, 5)) | {"weight": 1}]
    config = make_config(tmp_path, sources, stages=[{"samples": 320}], run="demo")
    megablend.build(config)
    stages = [{"samples": 320}, {"samples": 640, "shuffle_window": 8}]
    (tmp_path / "next.json").write_text(json.dumps(config | {"stages": stages}))
    return config


def test_an_amendment_during_another_one(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = importlib.import_module("megablend.api.amend")
    plan = module._plan_amended

    def plan_while_another_amends(*arguments: Any, **options: Any) -> Any:
        planned = plan(*arguments, **options)
        monkeypatch.setattr(module, "_plan_amended", plan)
        megablend.amend(tmp_path / "next.json", at=200)
        return planned

    monkeypatch.setattr(module, "_plan_amended", plan_while_another_amends)
    command = ("amend", tmp_path / "next.json", "--at", 100)
    with pytest.raises(CacheError, match=r"run 'demo' was changed by another process just now; try again$"):
        call(*command)
    assert "continues with other settings from sample 112 on" in call(*command)


def test_a_run_that_is_removed_while_it_is_shown(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check = manage_runs._check_exists

    def check_before_it_is_removed(*arguments: Any) -> None:
        check(*arguments)
        monkeypatch.setattr(manage_runs, "_check_exists", check)
        megablend.remove_run(config, "demo")

    monkeypatch.setattr(manage_runs, "_check_exists", check_before_it_is_removed)
    with pytest.raises(CacheError, match=r"run 'demo' was removed by another process just now$"):
        megablend.show_run(config, "demo")
    assert megablend.list_runs(config) == []


def test_an_index_without_a_source_of_its_run(tmp_path: Path) -> None:
    project = Project(tmp_path)
    shutil.copytree(project.cache, tmp_path / "backup")
    manifest = read_manifest(project.kept)
    manifest["sources"][0]["name"] = "b"
    (project.kept / "manifest.json").write_bytes(dump_with_checksum(manifest))
    roots = read_roots(project.kept)
    (project.kept / "roots.json").write_bytes(dump_with_checksum(roots | {"roots": {"b": roots["roots"]["a"]}}))
    command = ("show", project.cache, "--run", "default", "--sample", 0)
    with pytest.raises(CacheError, match=r"lacks source 'a' of run 'default'; restore the cache from a backup$"):
        call(*command)
    shutil.rmtree(project.cache)
    shutil.copytree(tmp_path / "backup", project.cache)
    assert call(*command)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", r"state\.json: expected a state saved as JSON: .*"),
        ("[]", r"state\.json: found list, expected a state saved as JSON \(of `loader\.state_dict\(\)`\)$"),
    ],
)
def test_a_file_that_is_not_a_state(tmp_path: Path, config: dict[str, Any], content: str, says: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    command = ("amend", tmp_path / "next.json", "--state", path)
    with pytest.raises(ConfigError, match=says):
        call(*command)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=8)
    next(iter(loader))
    path.write_text(json.dumps(loader.state_dict()))
    assert "continues with other settings" in call(*command)


def test_a_file_of_another_split(tmp_path: Path) -> None:
    names = ("train", "valid", "test")
    sources = {
        split: [write_source(tmp_path, i, "arrow", documents(i, 60, 20, 5), num_files=1)]
        for i, split in enumerate(names)
    }
    config = make_config(tmp_path, (), samples=20, valid_samples=4, test_samples=4) | {"sources": sources}
    (tmp_path / "run.json").write_text(json.dumps(config))
    megablend.build(config)
    for split in names[1:]:
        command = ("find", tmp_path / "run.json", f"source{names.index(split)}/0.arrow")
        says = "no source of train reads it; give the (--split) whose sources do"
        with pytest.raises(ConfigError, match=says) as caught:
            call(*command)
        option = re.search(says, str(caught.value))
        assert option
        assert call(*command, option[1], split)


def test_days_below_zero(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for days in (-1, float("nan")):
        with pytest.raises(ConfigError, match=r"found older_than_days=(-1|nan), expected 0 or more days"):
            megablend.gc(project.cache, older_than_days=days)
    for days in (0, 7):
        assert megablend.gc(project.cache, older_than_days=days).removed == ()


def test_a_stage_shorter_than_its_lanes(tmp_path: Path, config: dict[str, Any]) -> None:
    tokens = {"samples": None, "run": "other", "lanes": 16, "tokens": 8 * 640}
    stages: list[dict[str, Any]] = [{"tokens": 8 * 15}, {"lanes": 8}]
    given = {key: value for key, value in (config | tokens | {"stages": stages}).items() if value is not None}
    says = "it has 15 samples, fewer than its (16) lanes; end it later, or lower lanes"
    with pytest.raises(PlanError, match=says):
        megablend.build(given)
    later = given | {"stages": [{"tokens": 8 * 16}, {"lanes": 8}]}
    assert megablend.build(later | {"run": "later"}).ledger.ends[0] == 16
    assert megablend.build(given | {"run": "lower", "lanes": 8}).ledger.ends[0] == 8
