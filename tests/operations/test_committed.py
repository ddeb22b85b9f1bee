"""Runs opened from their ledgers, after their configs were edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.config import load_config
from megablend.operations.session import Session
from megablend.storage.by_scheme import StorageByScheme
from tests.runs import documents, make_config, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path, 0, "arrow", documents(0, 60, 30, seed=4)) | {"weight": 1}
    return make_config(tmp_path, [source], samples=40, run="demo")


def test_files_are_read_as_the_edited_config_says(config: dict[str, Any]) -> None:
    megablend.build(config)
    edited = config | {
        "seed": 99,
        "direct_io": True,
        "storage": {"s3://bucket/": {"region": "eu-north-1"}},
    }
    storage = Session(edited).open().store.storage
    assert isinstance(storage, StorageByScheme)
    assert storage._options.direct
    assert storage._options.objects == load_config(edited).storage != load_config(config).storage


@pytest.mark.parametrize("interleaving", ["lanes", "sequential"])
def test_a_cache_alone_gives_the_run(config: dict[str, Any], interleaving: str) -> None:
    config["interleaving"] = interleaving
    megablend.build(config)
    dataset = megablend.open(config)
    shown = [megablend.show(config["cache"], k, run="demo") for k in (0, 39)]
    assert [list(each.tokens[:-1]) for each in shown] == [
        dataset[k]["tokens"].tolist() for k in (0, 39)
    ]
