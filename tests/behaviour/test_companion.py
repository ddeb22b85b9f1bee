"""What is kept beside a ledger: opening a run compiles nothing where it fits, and gives the same run where it does not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.config import load_config
from megablend.config.model import OUTSIDE_REQUEST
from megablend.config.stages import MASKS
from megablend.errors import MegablendError, PlanError
from megablend.run import compile
from megablend.run import plan_stages as stage_requests
from megablend.run.ledger_file import load_ledger
from megablend.system.atomic_write import seal, unseal
from tests.runs import documents, make_config, read_fields, read_samples, write_source

STAGES: list[dict[str, Any]] = [
    {"samples": 320},
    {"samples": 640, "eod_mask_loss": True, "sources": {"s0": {"weight": 1}, "s1": {"weight": 2}}},
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose files tests copy."""
    folder = tmp_path_factory.mktemp("built")
    sources = [
        write_source(folder / "data", d, "parquet", documents(d, 60, 60, 5))
        | {"weight": 3 - d, "append_eod": 0}
        for d in (0, 1)
    ]
    config = make_config(folder, sources, stages=STAGES, split="80,20,0")
    megablend.build(config)
    return config


@pytest.fixture
def config(built: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    shutil.copytree(built["cache"], tmp_path / "cache")
    return built | {"cache": str(tmp_path / "cache")}


def list_companions(config: dict[str, Any]) -> list[Path]:
    return [
        path for path in sorted(Path(config["cache"], "splits").iterdir()) if is_companion(path)
    ]


def is_companion(path: Path) -> bool:
    """A companion has a head of JSON after its first number."""
    return path.is_file() and path.read_bytes()[8:9] == b"{"


def key_of(path: Path) -> bytes:
    """The key of the seal of a file in `splits`."""
    return bytes.fromhex(path.name.rpartition("-")[2])


def read(config: dict[str, Any], split: str = "train", **options: Any) -> list[Any]:
    """What a run is: its samples, counts and state."""
    dataset = megablend.open(config, split, **options)
    plan = dataset.run.plan
    ks = np.arange(len(dataset))
    located = [column.tolist() for column in plan.locate_many(ks)]
    return [
        located,
        plan.counts(len(dataset) // 3).tolist(),
        dataset.state_dict(10),
        read_fields(dataset),
    ]


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("compiled")


@pytest.fixture
def compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets compiling, and planning several stages, fail from the call on."""

    def start() -> None:
        monkeypatch.setattr(compile._Compiler, "request", refuse)
        monkeypatch.setattr(stage_requests._Planner, "drain_before", refuse)

    return start


@pytest.mark.long
def test_a_companion_of_another_release_is_read(
    config: dict[str, Any], compiles_nothing: Callable[[], None]
) -> None:
    """The release's number is changed before anything else is imported, so that all would see it."""
    samples = read(config)
    for path in list_companions(config):
        path.unlink()
    program = f"import megablend; megablend.__version__ = '9.9.9'; megablend.build({config!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert list_companions(config)
    compiles_nothing()
    assert read(config) == samples


def test_opening_compiles_nothing(
    config: dict[str, Any], compiles_nothing: Callable[[], None]
) -> None:
    state = megablend.open(config).state_dict(400)
    valid = read(config, "valid")
    edited = config | {"stages": [*STAGES, {"samples": 960, "sources": {"s0": {"weight": 5}}}]}
    megablend.amend(edited, at=600)
    compiles_nothing()
    choices: list[dict[str, Any]] = [{}, {"state": state}]
    moved = {"memory": "256MiB", "eod_mask_loss": True}
    for options in choices:
        dataset = megablend.open(edited | moved, **options)
        assert len(dataset) == 960
        assert not dataset.run.plan._plans
        dataset[3]
        assert len(dataset.run.plan._plans) == 1
    assert read(edited, "valid") == valid
    with pytest.raises(AssertionError, match="compiled"):
        megablend.open(config)  # as it was before the amendment


@pytest.mark.parametrize("split", ["train", "valid"])
def test_without_it_a_run_is_the_same(config: dict[str, Any], split: str) -> None:
    expected = read(config, split)
    (path,) = list_companions(config)
    whole = path.read_bytes()
    path.unlink()
    assert read(config, split) == expected
    if split == "valid":
        megablend.build(config)
    assert path.read_bytes() == whole  # opening train has written it
    for place in range(0, len(whole), max(1, len(whole) // 25)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert read(config, split) == expected
    path.unlink()
    path.mkdir()
    assert read(config, split) == expected


def test_a_cache_that_cannot_be_written(config: dict[str, Any]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root can write everywhere")
    expected = read(config)
    (path,) = list_companions(config)
    path.unlink()
    path.parent.chmod(0o500)
    try:
        assert read(config) == expected
    finally:
        path.parent.chmod(0o700)


def test_what_a_power_failure_left_empty_is_computed_again(config: dict[str, Any]) -> None:
    """Files in `splits` are not flushed."""
    before = read(config)
    files = {path: path.read_bytes() for path in Path(config["cache"], "splits").iterdir()}
    for path in files:
        path.write_bytes(b"")
    assert read(config) == before
    megablend.build(config)
    assert all(path.read_bytes() == whole for path, whole in files.items())


def test_another_spelling_is_the_same_request(
    config: dict[str, Any], compiles_nothing: Callable[[], None]
) -> None:
    expected = read(config)
    compiles_nothing()
    sources = [
        dict(reversed(source.items())) | {"weight": f"{source['weight']}.0"}
        for source in config["sources"]
    ]
    assert (
        read(dict(reversed((config | {"sources": sources, "split": [80, 20, 0]}).items())))
        == expected
    )


def test_a_default_that_is_written_is_compiled_once(
    config: dict[str, Any], compiles_nothing: Callable[[], None]
) -> None:
    written = config | {"interleaving": "lanes"}
    expected = read(written)
    compiles_nothing()
    assert read(written) == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": [STAGES[0], STAGES[1] | {"samples": 800}]}, "the config now requests 800"),
        ({"stages": [STAGES[0], {"samples": 640}]}, "share of source 's0' was"),
        ({"seed": 3}, "seed was"),
    ],
)
def test_another_request_is_still_refused(
    config: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(MegablendError, match=says):
        megablend.open(config | changes)


def test_a_longer_validation_is_what_the_config_says(config: dict[str, Any]) -> None:
    assert len(megablend.open(config | {"valid_samples": 33}, "valid")) == 33
    assert len(megablend.open(config, "valid")) != 33


OF_THE_RUN: dict[str, Any] = {
    "memory": "256MiB",
    "file_checks_per_second": 1,
    "direct_io": True,
    "storage": {"s3://bucket/": {"region": "eu-north-1"}},
    "warnings": {"max_epochs": 1},
    "on_bad_sample": "mask",
    "on_unreadable": "skip",
    "vocab_size": 10**6,
    "eod_token": 7,
    **dict.fromkeys(MASKS, True),
}
OF_A_SOURCE: dict[str, Any] = {"vocab_size": 10**6}
"""Of keys that cannot change which tokens a sample has, values that are not their defaults."""


@pytest.mark.parametrize(
    ("key", "value", "is_of_run"),
    [
        *((key, value, True) for key, value in OF_THE_RUN.items()),
        *((key, value, False) for key, value in OF_A_SOURCE.items()),
    ],
)
def test_keys_outside_the_request_change_no_token(
    config: dict[str, Any], key: str, value: Any, is_of_run: bool
) -> None:
    assert key in OUTSIDE_REQUEST
    first, *others = config["sources"]
    changed = (
        config | {key: value}
        if is_of_run
        else config | {"sources": [first | {key: value}, *others]}
    )
    assert load_config(changed).request_digest == load_config(config).request_digest
    changed["run"] = "other"
    megablend.build(changed)
    here = megablend.open(changed)
    before = megablend.open(config)
    assert here.run.ledger.digest == before.run.ledger.digest
    for mine, other in zip(read_samples(here), read_samples(before), strict=True):
        assert (mine.source, mine.ordinal) == (other.source, other.ordinal)
        assert mine.tokens.tolist() == other.tokens.tolist()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 8),
        ("sequence_length", 16),
        ("lanes", 2),
        ("shuffle_window", 2),
        ("order", "sequential"),
        ("interleaving", "sequential"),
        ("split", "70,30,0"),
        ("add_extra_token_to_sequence", False),
    ],
)
def test_keys_that_change_tokens_make_another_request(
    config: dict[str, Any], key: str, value: Any
) -> None:
    assert key not in OUTSIDE_REQUEST
    plain = {name: setting for name, setting in config.items() if name != "stages"}
    plain["samples"] = 640
    tokens = []
    for number, wanted in enumerate((plain, plain | {key: value})):
        run = wanted | {"run": f"run{number}"}
        megablend.build(run)
        tokens.append([sample.tokens.tolist() for sample in read_samples(megablend.open(run))])
    assert tokens[0] != tokens[1]
    assert load_config(plain).request_digest != load_config(plain | {key: value}).request_digest


def test_a_changed_copy_of_a_config_is_not_taken_for_it(config: dict[str, Any]) -> None:
    loaded = load_config(config)
    changed = loaded.model_copy(update={"seed": 3})
    assert changed.request_digest != loaded.request_digest
    with pytest.raises(PlanError, match="seed was"):
        megablend.open(changed)


@pytest.mark.parametrize(
    "field",
    ["starts", "others", "stages", "num_rows", "lanes", "cursor", "end", "blend", "index"],
)
@pytest.mark.parametrize("value", [None, [], "x", 10**30])
def test_with_a_right_checksum_and_other_fields_it_is_not_used(
    config: dict[str, Any], field: str, value: Any
) -> None:
    (path,) = list_companions(config)
    data = unseal(path.read_bytes(), key_of(path))
    assert data is not None
    stop = 8 + 8 * int.from_bytes(data[:8], "little")
    head = json.loads(data[8:stop])
    stages = head["stages"]
    requests = [stage["request"] for stage in stages]
    records = [head, *head["others"].values(), *stages, *requests]
    assert any(field in record for record in records)
    for record in records:
        if field in record:
            record[field] = value
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    changed = (len(text) // 8).to_bytes(8, "little") + text + data[stop:]
    path.write_bytes(seal(changed, key_of(path)))
    for split in ("train", "valid"):
        with contextlib.suppress(MegablendError):
            assert read(config, split) is not None


def test_the_plan_of_a_longer_run_is_not_used(config: dict[str, Any], tmp_path: Path) -> None:
    before = read(config)
    (path,) = list_companions(config)
    *stages, last = config["stages"]
    last = last | {"samples": last["samples"] + 16}
    longer = config | {"stages": [*stages, last], "cache": str(tmp_path / "longer")}
    megablend.build(longer)
    (other,) = list_companions(longer)
    data = unseal(other.read_bytes(), key_of(other))
    assert data is not None
    path.write_bytes(seal(data, key_of(path)))
    assert read(config) == before
    assert unseal(path.read_bytes(), key_of(path)) != data


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_cache_alone_opens_the_run(
    config: dict[str, Any], split: str, compiles_nothing: Callable[[], None]
) -> None:
    plain = config | {
        "stages": [STAGES[0], {k: v for k, v in STAGES[1].items() if k != "eod_mask_loss"}]
    }
    expected = read(plain, split)
    compiles_nothing()
    dataset = megablend.open(cache=config["cache"], run="default", split=split)
    assert [
        each.tolist() for each in dataset.run.plan.locate_many(np.arange(len(dataset)))
    ] == expected[0]
    assert dataset.state_dict(10) == expected[2]
    assert read_fields(dataset) == expected[3]
    resumed = megablend.open(cache=config["cache"], run="default", split=split, state=expected[2])
    assert resumed.consumed_samples == 10


def test_without_the_companion_a_cache_alone_has_train(config: dict[str, Any]) -> None:
    (path,) = list_companions(config)
    path.unlink()
    dataset = megablend.open(cache=config["cache"], run="default")
    assert dataset.state_dict() == megablend.open(config).state_dict()
    path.unlink()
    with pytest.raises(
        MegablendError, match="split valid: the cache has no valid split of run 'default'"
    ):
        megablend.open(cache=config["cache"], run="default", split="valid")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "found no config, expected the path .* both `cache` and `run`"),
        ({"cache": "CACHE"}, " both `cache` and `run`"),
        ({"cache": "CACHE", "run": "other"}, "contains no run 'other'"),
        (
            {"cache": "CACHE", "run": "default", "stage": 1, "split": "valid"},
            "found stage 1 without a config",
        ),
        ({"config": "CONFIG", "run": "default"}, "found both a config and run='default'"),
    ],
)
def test_what_is_to_be_opened_has_to_be_said(
    config: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    known = {"CACHE": config["cache"], "CONFIG": config}
    with pytest.raises(MegablendError, match=says):
        megablend.open(
            **{
                key: known.get(value, value) if isinstance(value, str) else value
                for key, value in options.items()
            }
        )


def test_a_state_of_another_plan_needs_its_config(config: dict[str, Any]) -> None:
    other = config | {"run": "other", "seed": 9}
    megablend.build(other)
    state = megablend.open(other).state_dict(100)
    with pytest.raises(MegablendError, match="the plan differs"):
        megablend.open(cache=config["cache"], run="default", state=state)


def test_the_ledger_says_what_requested_it(config: dict[str, Any]) -> None:
    ledger = load_ledger(config["cache"], "default")
    assert ledger is not None
    assert ledger.request == load_config(config).request_digest
    megablend.skip(config, 100, 120, batch_size=4)
    megablend.rename_run(config, "default", "new")
    renamed = load_ledger(config["cache"], "new")
    assert renamed is not None
    assert renamed.request == ledger.request
