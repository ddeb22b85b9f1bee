"""What is kept beside a ledger: opening a run uses it where it fits, and gives the same run where it does not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.config import Config, load_config
from megablend.config.load import _digest_request
from megablend.errors import MegablendError, PlanError
from megablend.plan import plan_file, specification, stage_requests
from tests.runs import documents, make_config, write_source

STAGES: list[dict[str, Any]] = [
    {"samples": 320},
    {"samples": 640, "sources": {"s0": {"weight": 1}, "s1": {"weight": 2}}},
]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    sources = [
        write_source(tmp_path / "data", d, "parquet", documents(d, 60, 60, 5)) | {"weight": 3 - d} for d in (0, 1)
    ]
    config = make_config(tmp_path, sources, stages=STAGES)
    megablend.build(config)
    return config


def list_files(config: dict[str, Any]) -> list[Path]:
    """The plan file, and the approval."""
    files = sorted(Path(config["cache"], "splits").iterdir(), key=lambda path: -path.stat().st_size)
    return [path for path in files if path.read_bytes() and is_of_a_plan(path)]


def is_of_a_plan(path: Path) -> bool:
    whole = path.read_bytes()
    return whole[:16] == plan_file._checksum(whole[16:], path.name)


def read(config: dict[str, Any], **options: Any) -> list[Any]:
    """What a run is: its samples, counts and state."""
    dataset = megablend.open(config, **options)
    plan, ks = dataset.run.plan, np.arange(len(dataset))
    tokens = [dataset[k]["tokens"].tolist() for k in (0, len(dataset) // 2, len(dataset) - 1)]
    located = [column.tolist() for column in plan.locate_many(ks)]
    return [located, plan.counts(len(dataset) // 3).tolist(), dataset.state_dict(100), tokens, dataset.run.weights]


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("computed again")


@pytest.fixture
def computes_nothing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets planning fail from the call on."""

    def start() -> None:
        monkeypatch.setattr(stage_requests._Planner, "plan", refuse)
        monkeypatch.setattr(specification, "request_stages", refuse)
        monkeypatch.setattr("megablend.plan.ledger_file.parse_ledger", refuse)

    return start


def test_opening_computes_nothing_that_is_kept(config: dict[str, Any], computes_nothing: Callable[[], None]) -> None:
    state = megablend.open(config).state_dict(400)
    edited = config | {"stages": [*STAGES, {"samples": 960, "sources": {"s0": {"weight": 5}}}]}
    megablend.amend(edited, at=600)
    computes_nothing()
    choices: list[dict[str, Any]] = [{}, {"state": state}]
    for options in choices:
        dataset = megablend.open(edited | {"memory": "256MiB"}, **options)
        assert len(dataset) == 960
        assert [made is None for made in dataset.run.plan._plans] == [True] * len(dataset.run.plan.stages)
        dataset[3]
        assert [made is None for made in dataset.run.plan._plans].count(False) == 1
    with pytest.raises(AssertionError, match="computed again"):
        megablend.open(config)  # as it was before the amendment


def test_without_it_a_run_is_the_same(config: dict[str, Any]) -> None:
    expected, files = read(config), list_files(config)
    assert len(files) == 2
    contents = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    assert read(config) == expected
    assert list_files(config) == []  # opening writes nothing
    megablend.build(config)
    assert [path.read_bytes() for path in list_files(config)] == contents


def test_what_a_power_failure_left_empty_is_computed_again(config: dict[str, Any]) -> None:
    """Files in `splits` are not flushed."""
    config |= {"split": "90,10,0", "run": "split"}
    megablend.build(config)
    before, files = read(config), {path: path.read_bytes() for path in Path(config["cache"], "splits").iterdir()}
    for path in files:
        path.write_bytes(b"")
    assert read(config) == before
    megablend.build(config)
    assert sum(path.read_bytes() == whole for path, whole in files.items()) >= 3  # those of the run


def test_damaged_or_of_another_run_it_is_not_used(config: dict[str, Any]) -> None:
    expected, (file, approval) = read(config), list_files(config)
    whole = file.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 25)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert read(config) == expected
    other = config | {"run": "other", "stages": [STAGES[0] | {"samples": 160}]}
    megablend.build(other)
    others = [path for path in list_files(config) if path not in (file, approval)]
    file.write_bytes(max(others, key=lambda path: path.stat().st_size).read_bytes())
    approval.write_bytes(min(others, key=lambda path: path.stat().st_size).read_bytes())
    assert read(config) == expected
    megablend.build(config)
    assert file.read_bytes() == whole
    for path in (file, approval):
        path.unlink()
        path.mkdir()
    assert read(config) == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": [STAGES[0], STAGES[1] | {"samples": 800}]}, "the config now asks for 800"),
        ({"stages": [STAGES[0], {"samples": 640}]}, "share of source 's0' was"),
        ({"seed": 3}, "seed was"),
    ],
)
def test_another_request_is_still_refused(config: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(MegablendError, match=says):
        megablend.open(config | changes)


IRRELEVANT = {
    *("cache", "local_cache", "memory", "file_checks_per_second", "direct_io", "storage", "warnings", "on_bad_sample"),
    *("vocab_size", "eod_token"),
}
"""Keys that cannot change which tokens a sample of train has."""


@pytest.mark.parametrize("key", sorted(Config.model_fields))
def test_every_key_that_can_affect_the_plan_makes_another_request(key: str) -> None:
    given = dict.fromkeys(Config.model_fields, "x")
    is_same = _digest_request(given) == _digest_request({**given, key: "y"})
    assert is_same == (key in IRRELEVANT)


def test_a_changed_copy_of_a_config_is_not_taken_for_it(config: dict[str, Any]) -> None:
    loaded = load_config(config)
    assert loaded.request_digest is not None
    changed = loaded.model_copy(update={"seed": 3})
    assert changed.request_digest is None
    with pytest.raises(PlanError, match="seed was"):
        megablend.open(changed)


@pytest.mark.parametrize("field", ["run", "stages", "data", "plan", "sizes", "digest", "lanes", "sources", "cursor"])
@pytest.mark.parametrize("value", [None, [], "x", 10**30])
def test_with_a_right_checksum_and_other_fields_it_is_not_used(config: dict[str, Any], field: str, value: Any) -> None:
    expected, path = read(config), list_files(config)[0]
    data = path.read_bytes()[16:]
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    for record in (head, *head["stages"], *head["plan"]["stages"]):
        if field in record:
            record[field] = value
    record = json.dumps(head).encode()
    changed = len(record).to_bytes(8, "little") + record + data[8 + size :]
    path.write_bytes(plan_file._checksum(changed, path.name) + changed)
    if field == "data":
        assert read(config) == expected
    with contextlib.suppress(MegablendError):
        assert read(config) is not None
