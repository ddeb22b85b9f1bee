"""A cache in an object store (Azurite): the same index, the same samples, the same commands as for one in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megablend
from tests.runs import documents, make_config, write_source


def configs(folder: Path, remote: str, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run with a cache in a folder, and the same run with one in an object store."""
    kinds = ("parquet", "megatron")
    sources = [
        write_source(folder / "data", number, kind, documents(number, 40, 20, seed=1)) | {"weight": 1 + number}
        for number, kind in enumerate(kinds)
    ]
    config = make_config(folder, sources, samples=40, append_eod=None, **settings)
    config.pop("append_eod")
    return config, config | {"cache": remote}


def samples(config: dict[str, Any], **options: Any) -> list[list[int]]:
    dataset = megablend.open(config, **options)
    return [dataset[k]["tokens"].tolist() for k in range(len(dataset))]


@pytest.mark.parametrize("order", ["block", "document"])
def test_index_and_samples_are_those_of_a_folder(
    tmp_path: Path, remote: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, config = configs(tmp_path, remote, order=order)
    expected, found = megablend.build(local), megablend.build(config)
    assert found.index.digest == expected.index.digest
    assert found.ledger == expected.ledger
    assert samples(config) == samples(local)
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "another node"))
    assert samples(config) == samples(local)
    again = megablend.build(config)
    assert (again.index.read, again.index.created, again.index.digest) == (0, False, expected.index.digest)
