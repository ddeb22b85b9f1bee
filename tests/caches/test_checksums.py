"""Checksums of blocks: bits that flip on the way from a web server never become tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import CorruptFileError
from tests.runs import documents, make_config, write_source
from tests.storage.faulty import Faults, FaultySource
from tests.storage.objects.test_http import list_files


@pytest.fixture
def source(obstore: None, tmp_path: Path) -> Any:
    folder = tmp_path / "data"
    kinds = ("parquet", "arrow")
    listed = [
        write_source(folder, i, kind, documents(i, 300, 40, seed=1)) | {"weight": 1} for i, kind in enumerate(kinds)
    ]
    files = {f"d/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with FaultySource(files) as server:
        remote = [
            each | {"path": [path.replace(str(folder), f"{server.url}/d") for path in list_files(each)]}
            for each in listed
        ]
        yield server, make_config(tmp_path, remote, samples=600, cache=str(tmp_path / "cache"))


def tokens(dataset: Any) -> list[list[int]]:
    return [dataset[k]["tokens"].tolist() for k in range(len(dataset))]


def open_files(config: dict[str, Any]) -> Any:
    """A dataset that has read footers and `.idx` files, which have digests of their own, but no blocks."""
    dataset = megablend.open(config)
    store = dataset.run.store
    for number in range(store.generation.num_files):
        store._files.get(number)
    return dataset


def test_flipped_bits_never_become_tokens(source: Any) -> None:
    server, config = source
    index = megablend.build(config).index
    expected = tokens(megablend.open(config))
    assert megablend.build(config, checksums=True).index.digest == index.digest
    dataset, damaged = open_files(config), open_files(config)
    server.faults = Faults(flip=0.2)
    assert tokens(dataset) == expected
    assert server.faulty["flip"] > 5
    server.faults = Faults(flip=1.0)
    with pytest.raises(CorruptFileError, match="bytes differ from their checksum in the index, 4 times in a row"):
        tokens(damaged)
    assert megablend.verify(config["cache"]).problems == ()
