"""Runs listed, shown, renamed, reset, removed: what was promised to checkpoints stays, and a change is whole or not there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.base import CacheStore
from megablend.caches.local import LocalCacheStore
from megablend.errors import CacheError, ConfigError
from megablend.operations import manage_runs
from megablend.run.ledger_file import run_names
from megablend.system.build_lock import build_lock
from tests.runs import documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [
        write_source(tmp_path / "data", d, "arrow", documents(d, 60, 30, 5)) | {"weight": 1}
        for d in range(2)
    ]
    config = make_config(tmp_path, sources, samples=100, run="demo")
    megablend.build(config)
    return config


def states(config: dict[str, Any]) -> dict[str, Any]:
    return megablend.open(config).state_dict(40)


def names(config: dict[str, Any]) -> list[str]:
    return [run.to_dict()["run"] for run in megablend.list_runs(config)]


def test_runs_are_listed_and_shown_by_cache_or_config(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    (listed,) = megablend.list_runs(tmp_path / "cache")
    assert (
        listed.to_dict()["run"],
        listed.to_dict()["stages"],
        listed.to_dict()["index_exists"],
    ) == (
        "demo",
        [100],
        True,
    )
    shown = megablend.show_run(config, "demo")
    assert shown.to_dict()["plan"] == listed.to_dict()["plan"]
    assert [source["share"] for source in shown.to_dict()["blend"]["sources"]] == ["1/2", "1/2"]
    (tmp_path / "cache" / "runs" / "bad.json").write_text("{")
    assert [("problem" in run.to_dict()) for run in megablend.list_runs(config)] == [True, False]


def test_a_run_that_is_built_meanwhile_has_its_index(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "data", 2, "arrow", documents(2, 60, 30, 5)) | {"weight": 1}

    def build_first(cache: CacheStore) -> list[str]:
        megablend.build(config | {"run": "new", "sources": [source]})
        return run_names(cache)

    monkeypatch.setattr(manage_runs, "run_names", build_first)
    listed = [run.to_dict() for run in megablend.list_runs(config)]
    assert [(run["run"], run["index_exists"]) for run in listed] == [("demo", True), ("new", True)]


@pytest.mark.parametrize("order", ["block", "document", "sequential"])
def test_blends_are_shown_in_the_terms_of_configs(
    tmp_path: Path, config: dict[str, Any], order: str
) -> None:
    stages = [{"samples": 64}, {"samples": 128, "order": "block", "shuffle_window": 2}]
    run = config | {
        "run": "other",
        "samples": None,
        "order": order,
        "shuffle_window": 16,
        "stages": stages,
    }
    megablend.build(run)
    shown = megablend.show_run(run, "other")
    blend = shown.to_dict()["blend"]
    assert (blend["order"], blend["shuffle_window"], blend["plan_version"]) == ("block", 2, 2)
    changes = {
        each["what"]: (each["before"], each["after"])
        for each in shown.to_dict()["chain"][1]["changes"]
    }
    assert changes["shuffle_window"] == (16, 2)
    assert changes.get("order", ("block", "block")) == (order, "block")
    ledger = tmp_path / "cache" / "runs" / "other.json"
    (tmp_path / "b.json").write_text(
        json.dumps(run | {"run": "third", "stages": stages[:1], "shuffle_window": 8})
    )
    what = {
        each["what"]: (each["a"], each["b"])
        for each in megablend.diff(ledger, tmp_path / "b.json").to_dict()["differences"]
    }
    assert what["shuffle_window"] == (16, 8)
    assert not {"cycle", "plan"} & (what.keys() | changes.keys() | blend.keys())


def test_a_typo_in_samples_is_not_final(config: dict[str, Any]) -> None:
    longer = megablend.open(config).state_dict(40)
    asked = config | {"samples": 50}
    with pytest.raises(
        megablend.PlanError, match="was built for 100 samples, but 50 are now requested"
    ):
        megablend.build(asked)
    aside = Path(megablend.reset_run(config, "demo"))
    with pytest.raises(megablend.CacheError, match="contains no run 'demo'"):
        megablend.open(asked)
    assert megablend.build(asked).ledger.ends == (50,)
    with pytest.raises(megablend.StateError, match="the plan differs"):
        megablend.open(asked).load_state_dict(longer)
    assert len(megablend.open(config, state=longer)) == 100  # by its state it still finds its own
    assert json.loads(aside.read_text())["ends"] == [100]
    megablend.remove_run(config, "demo")
    assert not aside.exists()


def test_states_stay_good_where_the_plan_does(config: dict[str, Any]) -> None:
    before = states(config)
    megablend.reset_run(config, "demo")
    megablend.build(config)
    again = megablend.open(config)
    again.load_state_dict(before)
    assert again.consumed_samples == 40
    megablend.rename_run(config, "demo", "other")
    renamed = megablend.open(config | {"run": "other"})
    renamed.load_state_dict(before)
    assert (names(config), renamed.consumed_samples) == (["other"], 40)
    megablend.remove_run(config, "other")
    assert names(config) == []
    assert megablend.open(config, state=before).consumed_samples == 40


def test_a_ledger_that_was_set_aside_can_be_moved_back(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    before = states(config)
    aside = Path(megablend.reset_run(config, "demo"))
    aside.rename(tmp_path / "cache" / "runs" / "demo.json")
    assert states(config) == before


def test_a_rename_that_was_interrupted_is_completed(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", fail)
        with pytest.raises(KeyboardInterrupt):
            megablend.rename_run(config, "demo", "other")
    assert names(config) == ["demo", "other"]
    megablend.rename_run(config, "demo", "other")
    assert names(config) == ["other"]


def test_names_that_the_file_system_does_not_distinguish(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = LocalCacheStore._path

    def path_without_case(self: LocalCacheStore, *names: str) -> Path:
        return path(self, *(name.lower() for name in names))

    megablend.skip(config, 8, 16, batch_size=4)
    monkeypatch.setattr(LocalCacheStore, "_path", path_without_case)
    for call in (
        lambda: megablend.rename_run(config, "demo", "Demo"),
        lambda: megablend.build(config | {"run": "Demo"}),
    ):
        with pytest.raises(CacheError, match=r"run 'demo', expected that of 'Demo'.*ignores case"):
            call()
    assert megablend.open(config).skips.ranges == ((8, 16),)


def test_a_slip_in_a_path_is_no_empty_cache(tmp_path: Path, config: dict[str, Any]) -> None:
    for call in (megablend.list_runs, lambda what: megablend.show_run(what, "demo")):
        with pytest.raises(
            ConfigError,
            match=r"no.json: no such file or folder; expected a config, or a cache",
        ):
            call(tmp_path / "no.json")
    assert megablend.list_runs(config | {"cache": str(tmp_path / "later")}) == []


def test_a_folder_that_is_no_cache_has_no_runs_to_list(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    calls: list[Callable[[str], object]] = [
        megablend.list_runs,
        lambda what: megablend.show_run(what, "demo"),
        lambda what: megablend.rename_run(what, "demo", "other"),
        lambda what: megablend.reset_run(what, "demo"),
        lambda what: megablend.remove_run(what, "demo"),
        megablend.gc,
        megablend.verify,
    ]
    message = "data: there is no cache here: build one, or specify another location"
    for call in calls:
        with pytest.raises(megablend.CacheError, match=message):
            call(str(tmp_path / "data"))
    assert list((tmp_path / "data").glob("[!s]*")) == []
    (tmp_path / "empty").mkdir()
    for cache in ("later", "empty"):  # a config may be ahead of its cache
        assert megablend.list_runs(config | {"cache": str(tmp_path / cache)}) == []


def test_what_the_messages_expect(tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "no.json"
    with pytest.raises(
        ConfigError, match="expected a config, or a cache filled by `megablend build CONFIG`"
    ):
        megablend.list_runs(path)
    path.write_text(json.dumps(config))
    megablend.build(path)
    assert megablend.list_runs(path) == megablend.list_runs(config["cache"]) != []
    with pytest.raises(ConfigError, match="the new name of run 'demo' is the same as the old one"):
        megablend.rename_run(config, "demo", "demo")
    megablend.rename_run(config, "demo", "another")
    says = r"expected a name of at most 100 letters, digits, '\.', '_' and '-', that begins with a letter or digit"
    with pytest.raises(ConfigError, match=says):
        megablend.rename_run(config, "another", "_another")
    for number, new in enumerate(("9a._-", "x" * 100)):
        megablend.rename_run(config, names(config)[0], new)
        assert names(config) == [new], number
    with pytest.raises(megablend.CacheError, match=r"contains no run 'demo'; its runs: 'x+'$"):
        megablend.show_run(config, "demo")
    assert megablend.show_run(config, "x" * 100).run == "x" * 100


def test_names_that_are_taken_missing_or_no_names(config: dict[str, Any]) -> None:
    megablend.build(config | {"run": "other", "samples": 30})
    before = megablend.list_runs(config)
    with pytest.raises(
        megablend.ConfigError, match="a run 'other' already exists; remove it first"
    ):
        megablend.rename_run(config, "demo", "other")
    with pytest.raises(
        megablend.ConfigError, match="the new name of run 'demo' is the same as the old one"
    ):
        megablend.rename_run(config, "demo", "demo")
    for change in (megablend.show_run, megablend.reset_run, megablend.remove_run):
        with pytest.raises(
            megablend.CacheError, match=r"contains no run 'demmo'; its runs: 'demo', 'other'$"
        ):
            change(config, "demmo")
        with pytest.raises(
            megablend.ConfigError,
            match=r"found run '\.\./demo', expected a name of at most 100 letters",
        ):
            change(config, "../demo")
    for bad in ("a/b", "", ".hidden", "a\n", "x" * 101):
        with pytest.raises(megablend.ConfigError, match="expected a name of at most 100 letters"):
            megablend.rename_run(config, "demo", bad)
    assert megablend.list_runs(config) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda config: megablend.rename_run(config, "demo", "other"),
        lambda config: megablend.reset_run(config, "demo"),
        lambda config: megablend.remove_run(config, "demo"),
    ],
    ids=["rename", "reset", "remove"],
)
def test_changes_wait_for_a_build(
    config: dict[str, Any],
    change: Callable[[dict[str, Any]], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = Path(config["cache"])
    monkeypatch.setattr("megablend.system.build_lock.WAIT_SECONDS", 0.2)
    with (
        build_lock(cache),
        pytest.raises(megablend.CacheError, match=f"another build .*pid {os.getpid()}"),
    ):
        change(config)
    assert names(config) == ["demo"]
    monkeypatch.setattr("megablend.system.build_lock.WAIT_SECONDS", 240.0)
    changed = threading.Event()
    with build_lock(cache):

        def work() -> None:
            change(config)
            changed.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert not changed.wait(0.3)
        assert names(config) == ["demo"]
    thread.join(240)
    assert changed.is_set()
    assert names(config) != ["demo"]


def test_a_damaged_ledger_can_be_reset_or_removed(tmp_path: Path, config: dict[str, Any]) -> None:
    ledger = tmp_path / "cache" / "runs" / "demo.json"
    ledger.write_text(ledger.read_text().replace("100", "101"))
    with pytest.raises(megablend.CacheError, match="does not match its checksum"):
        megablend.rename_run(config, "demo", "other")
    megablend.reset_run(config, "demo")
    megablend.build(config)
    ledger.write_text("{")
    megablend.remove_run(config, "demo")
    assert names(config) == []
