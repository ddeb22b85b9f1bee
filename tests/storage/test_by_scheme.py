"""The storage of a config: each location through the storage of its scheme; storages of other packages; wrappers."""

from __future__ import annotations

import importlib.metadata
import inspect
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import megablend
from megablend.config import load_config
from megablend.errors import ConfigError
from megablend.storage.base import Storage
from megablend.storage.by_scheme import StorageByScheme, make_storage
from megablend.storage.descriptors import default_capacity, shared_pool
from megablend.storage.registry import STORAGES, StorageOptions
from megablend.storage.wrapper import WrapperStorage
from megablend.testing.moved import SCHEME, MovedStorage
from tests.runs import documents, make_config, write_source


class Moved(MovedStorage):
    """`moved://x` is the local file `/x`, descriptors included: a storage as another package would bring it."""

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        return self.inner.descriptor(path.removeprefix(SCHEME))


def make_moved(options: StorageOptions) -> Storage:
    return Moved(STORAGES[""](options))


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package whose entry point names `make_moved`."""
    entries = importlib.metadata.EntryPoints(
        [
            importlib.metadata.EntryPoint("moved", f"{__name__}:make_moved", "megablend.storages"),
            importlib.metadata.EntryPoint("broken", "no_such_module:make", "megablend.storages"),
        ]
    )
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **chosen: entries.select(**chosen)
    )
    with mock.patch.dict(STORAGES):
        yield


@pytest.mark.parametrize("kind", ["parquet", "arrow", "megatron"])
def test_a_run_over_another_packages_storage_has_the_same_samples(
    tmp_path: Path, moved: None, kind: str
) -> None:
    source = write_source(tmp_path, 0, kind, documents(0, 60, 20, seed=1)) | {"weight": 1}
    plain = make_config(tmp_path, [source], samples=12, cache=str(tmp_path / "plain"))
    other = make_config(
        tmp_path,
        [source | {"path": f"moved:/{source['path']}"}],
        samples=12,
        cache=str(tmp_path / "other"),
    )
    digests = [megablend.build(config).ledger.digest for config in (plain, other)]
    assert digests[0] == digests[1]
    a = megablend.open(plain)
    b = pickle.loads(pickle.dumps(megablend.open(other)))
    assert all(a[k]["tokens"].equal(b[k]["tokens"]) for k in range(12))
    assert megablend.show(other, 3).to_dict()["pieces"][0]["file"].startswith(f"moved:/{tmp_path}")
    assert megablend.verify(other["cache"], data=True).problems == ()
    assert megablend.check(other).problems == ()


def test_a_source_of_two_storages_is_refused(tmp_path: Path, moved: None) -> None:
    config = make_config(
        tmp_path, [{"name": "a", "path": ["moved://x/a.bin", "b.bin"], "epochs": 1}]
    )
    with pytest.raises(
        ConfigError, match=r"sources\[0\].path: its paths are in different storage systems"
    ):
        load_config(config)


def test_a_storage_that_cannot_be_loaded_is_named(moved: None) -> None:
    with pytest.raises(
        ConfigError, match=r"broken://: its storage 'no_such_module:make' cannot be loaded"
    ):
        make_storage().stat("broken://x")


def test_options_reach_the_storage_and_survive_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123")
    try:
        made = make_storage(max_open_files=3)
        shared_pool("local", 9)
        again = pickle.loads(pickle.dumps(made))
        assert again.read(str(tmp_path / "x"), 1, 2) == b"12"
        assert shared_pool("local").capacity == 3
    finally:
        shared_pool("local", default_capacity())


@pytest.mark.parametrize("kind", [WrapperStorage, StorageByScheme])
def test_every_call_is_handed_on(tmp_path: Path, kind: type) -> None:
    """A method that the protocol gains and these lack would be found by the first user only."""
    names = {
        name
        for name, _ in inspect.getmembers(Storage, inspect.isfunction)
        if not name.startswith("_")
    }
    assert names <= {name for name, _ in inspect.getmembers(kind, inspect.isfunction)}
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    storage = WrapperStorage(make_storage()) if kind is WrapperStorage else make_storage()
    for each in (storage, storage.for_checking()):
        assert (
            each.glob(f"{tmp_path}/*")
            == [match.path for match in each.find(str(path)).files]
            == [str(path)]
        )
        assert each.is_folder(str(tmp_path))
        assert each.is_readable(str(path))
        assert each.stat(str(path)) == each.stat_opened(str(path))
        data, begins = each.read_ranges(
            str(path), np.array([5, 1]), np.array([2, 3]), lambda size: np.empty(size, np.uint8)
        )
        assert [data[i : i + n].tobytes() for i, n in zip(begins, (2, 3), strict=True)] == [
            b"56",
            b"123",
        ]
        with each.descriptor(str(path)) as fd:
            assert fd >= 0
        assert each.limits(str(path)).max_gap_bytes == 2048
