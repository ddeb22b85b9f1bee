"""One storage for several calls: an open run stays with the files that it opened, whatever a later call finds or opens."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.errors import ChangedFileError
from megablend.operations.check_data import check_data
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.descriptors import default_capacity, shared_pool
from tests.formats.writers import KINDS
from tests.runs import make_config, write_source
from tests.storages import CountingStorage

DOCUMENTS = [list(range(start, start + 40)) for start in range(0, 400, 40)]
OTHERS = [[token + 5_000 for token in document] for document in DOCUMENTS]


@pytest.fixture(params=["parquet", "arrow", "megatron"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A run of 40 samples over one file, read through few descriptors."""
    source = write_source(tmp_path, 0, request.param, DOCUMENTS, num_files=1) | {"epochs": 1}
    return make_config(tmp_path, [source])


@pytest.fixture(autouse=True)
def _one_descriptor() -> Iterator[None]:
    """The process keeps one file open, so that a path is opened again and again."""
    shared_pool("local", 1)
    yield
    shared_pool("local", default_capacity())


def replace_file(folder: Path) -> None:
    """Other tokens in a file of the same kind and size are moved to the run's path."""
    (path,) = (each for each in (folder / "source0").iterdir() if each.suffix != ".idx")
    kind = next(kind for kind in KINDS.values() if kind.suffix == path.suffix)
    other = folder / f"other{path.suffix}"
    kind.write(other, OTHERS)
    other.replace(path)
    if path.suffix == ".bin":
        other.with_suffix(".idx").replace(path.with_suffix(".idx"))


def read_all(dataset: Any, *, start: int = 0) -> list[list[int]]:
    return [dataset[k]["tokens"].tolist() for k in range(start, len(dataset))]


def open_something_else(folder: Path) -> None:
    """Push the run's file out of the pool of descriptors."""
    (folder / "else").write_bytes(b"0")
    make_storage().read(str(folder / "else"), 0, 1)


LATER: dict[str, Callable[[dict[str, Any], Storage], object]] = {
    "build": lambda config, storage: megablend.build(config, storage=storage),
    "build of another run": lambda config, storage: megablend.build(
        config | {"run": "b"}, storage=storage
    ),
    "check": lambda config, storage: megablend.check(config, storage=storage),
    "check --data": lambda config, storage: check_data(config, storage=storage),
    "open of another cache": lambda config, storage: open_in_another_cache(config, storage),
    "open_index": lambda config, storage: megablend.open_index(config["cache"], storage=storage),
}


def open_in_another_cache(config: dict[str, Any], storage: Storage) -> None:
    """A run that has the new file, which reads it through the same storage."""
    other = config | {"cache": config["cache"] + "-b"}
    megablend.build(other)
    found = read_all(megablend.open(other, storage=storage))
    assert min(map(min, found)) >= 5_000


@pytest.mark.parametrize("later", LATER)
def test_an_open_run_never_reads_a_file_that_replaced_its_own(
    config: dict[str, Any], tmp_path: Path, later: str
) -> None:
    storage = make_storage()
    megablend.build(config, storage=storage)
    expected = read_all(megablend.open(config))
    dataset = megablend.open(config, storage=storage)
    assert dataset[0]["tokens"].tolist() == expected[0]
    open_something_else(tmp_path)
    replace_file(tmp_path)
    try:
        LATER[later](config, storage)
    except ChangedFileError:
        assert later == "check --data"
    open_something_else(tmp_path)
    with pytest.raises(ChangedFileError, match=r"was replaced while it was in use"):
        read_all(dataset, start=1)


def test_what_a_wrapper_counts_is_counted_in_one_place(config: dict[str, Any]) -> None:
    megablend.build(config)
    storage = CountingStorage(make_storage())
    dataset = megablend.open(config, storage=storage)
    expected = read_all(dataset)
    counted = storage.bytes
    assert counted > 0
    again = pickle.loads(pickle.dumps(storage))
    assert (again.bytes, type(again.inner)) == (counted, type(storage.inner))
    view = storage.for_reading()
    assert isinstance(view, CountingStorage)
    assert view.inner is not storage.inner
    storage.bytes = 0
    assert read_all(megablend.open(config, storage=view)) == expected
    assert view.bytes == storage.bytes == counted
