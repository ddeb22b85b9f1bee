"""Checksums of blocks: bits that flip on the way from a web server never become tokens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import ChangedFileError, CorruptFileError
from megablend.index.blocks import open_files as check_fetched
from megablend.index.read.block_checksums import find_wrong
from tests.runs import documents, make_config, write_source
from tests.storage.faulty import Faults, FaultySource
from tests.storage.objects.test_http import list_files


@pytest.fixture
def source(obstore: None, tmp_path: Path) -> Any:
    folder = tmp_path / "data"
    kinds = ("parquet", "arrow")
    listed = [
        write_source(folder, i, kind, documents(i, 300, 40, seed=1)) | {"weight": 1}
        for i, kind in enumerate(kinds)
    ]
    files = {
        f"d/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    with FaultySource(files) as server:
        remote = [
            each
            | {"path": [path.replace(str(folder), f"{server.url}/d") for path in list_files(each)]}
            for each in listed
        ]
        yield server, make_config(tmp_path, remote, samples=600, cache=str(tmp_path / "cache"))


def tokens(dataset: Any) -> list[list[int]]:
    return [dataset[k]["tokens"].tolist() for k in range(len(dataset))]


def test_what_is_damaged_each_time_is_an_error(source: Any) -> None:
    server, config = source
    megablend.build(config, checksums=True)
    dataset = megablend.open(config)
    other = megablend.open(config)
    store = dataset.run.store
    for number in range(store.snapshot.num_files):
        store._files.get(number)  # footers have digests of their own
    server.faults = Faults(flip=1.0)
    with pytest.raises(
        CorruptFileError, match="bytes differ from their checksum in the index, 8 times in a row"
    ):
        tokens(dataset)
    with pytest.raises((CorruptFileError, ChangedFileError)):
        tokens(other)
    server.faults = Faults()
    assert megablend.verify(config["cache"]).problems == ()


def test_checksums_are_not_computed_in_the_event_loop_of_the_client(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = source
    megablend.build(config, checksums=True)
    threads = list[str]()

    def find(*arguments: Any) -> list[tuple[int, int]]:
        threads.append(threading.current_thread().name)
        return find_wrong(*arguments)

    monkeypatch.setattr(check_fetched, "find_wrong", find)
    loader = megablend.Loader(megablend.open(config), micro_batch_size=2)
    for _ in zip(range(3), loader, strict=False):
        pass
    loader.close()  # or what is in flight is requested again, for minutes after the server has ended
    assert threads
    assert not any(name.startswith("megablend-objects") for name in threads)
