"""Names in files of a cache that lead out of it, or that a terminal would obey."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.base import place_below
from megablend.errors import CacheError, MegablendError
from megablend.run.ledger import Ledger
from megablend.run.ledger_file import load_ledger
from megablend.run.ledger_format import dump_ledger
from tests.cli.commands import run
from tests.runs import documents, make_config, write_source

NAMES = [
    "../../home/victim",
    "..",
    ".",
    "",
    "/etc/passwd",
    "a/b",
    "a\x1b[2J",
    "a\nb",
    "a\x00b",
    "a\x7f",
]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path / "data", 0, "parquet", documents(0, 60, 40, 3)) | {"weight": 1}
    given = make_config(tmp_path / "here", [source], samples=96)
    megablend.build(given)
    return given


@pytest.mark.parametrize("name", NAMES)
def test_no_place_is_outside_of_a_cache(name: str) -> None:
    with pytest.raises(CacheError, match="slashes and control characters are not allowed"):
        place_below("runs", name)


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["../../victim", "other", "de\x1b[31mfault"])
def test_a_ledger_of_another_name_is_refused_and_writes_nothing(
    config: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """A ledger says itself how its run is called; its file's name counts."""
    path = Path(config["cache"]) / "runs" / "default.json"
    ledger = load_ledger(config["cache"], "default")
    assert isinstance(ledger, Ledger)
    path.write_text(dump_ledger(name, ledger.stages))
    (tmp_path / "victim.json").write_text("{}")
    before = list_files(tmp_path)
    calls: list[Callable[[], Any]] = [
        lambda: megablend.skip(config, 8, 16, batch_size=4),
        lambda: megablend.build(config | {"samples": 192}),
        lambda: megablend.open(config),
        lambda: megablend.rename_run(config, "default", "new"),
    ]
    for call in calls:
        with pytest.raises(
            CacheError,
            match=r"runs/default\.json: found the ledger of run .* `megablend runs rename`",
        ):
            call()
    after = list_files(tmp_path)
    assert {
        place: data for place, data in after.items() if "/runs/" in place or "victim" in place
    } == {place: data for place, data in before.items() if "/runs/" in place or "victim" in place}
    assert "default.json: found the ledger of run" in "".join(
        megablend.verify(config["cache"]).problems
    )
    done = run("runs", "list", config["cache"])
    assert "\x1b" not in done.stdout + done.stderr
    path.write_text(dump_ledger("default", ledger.stages))
    megablend.open(config)


@pytest.mark.parametrize("index", ["../../elsewhere", "\x1b[2J"])
def test_an_index_that_a_ledger_or_a_state_names_is_looked_for_in_the_cache(
    config: dict[str, Any], index: str
) -> None:
    path = Path(config["cache"]) / "runs" / "default.json"
    state = megablend.open(config).state_dict()
    with pytest.raises(MegablendError):
        megablend.open(config, state=state | {"index": index})
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    stages = tuple(
        type(stage)(end=stage.end, index=index, blend=stage.blend) for stage in ledger.stages
    )
    path.write_text(dump_ledger("default", stages))
    for call in (megablend.open, megablend.describe, megablend.build):
        with pytest.raises(MegablendError):
            call(config)
    assert json.loads(path.read_text())["index"] == index


def test_terminals_get_no_control_characters(tmp_path: Path) -> None:
    source = write_source(tmp_path / "data", 0, "parquet", documents(0, 60, 40, 3)) | {
        "weight": 1,
        "name": "a\x1b[2Jb",
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(make_config(tmp_path, [source], samples=96)))
    for command in (["build"], ["describe"], ["show", "--sample", "0"], ["check"]):
        done = run(command[0], path, *command[1:])
        assert "\x1b" not in done.stdout + done.stderr, command
        assert command != ["build"] or done.returncode == 2 or "\\x1b[2J" in done.stdout
