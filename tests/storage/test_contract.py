"""The contract of storages, for each of the project's own that reads local files, and for wrappers around them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from megablend.storage.base import Allocate, Bytes, Int64s, Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.descriptors import default_capacity, shared_pool
from megablend.storage.direct import DirectStorage
from megablend.storage.local import LocalStorage
from megablend.storage.wrapper import WrapperStorage
from megablend.testing.storages import StorageContract


def write_local(folder: Path, files: Mapping[str, bytes]) -> str:
    """As other programs replace files: a new file takes the old one's name."""
    for name, content in files.items():
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(".new")
        new.write_bytes(content)
        new.replace(path)
    return str(folder / "files")


class CountingStorage(WrapperStorage):
    """A wrapper that overrides a single method."""

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        found = super().read_ranges(path, offsets, sizes, allocate)
        assert len(found[1]) == len(offsets)
        return found


STORAGES: dict[str, Callable[[], Storage]] = {
    "local": LocalStorage,
    "local, one descriptor": LocalStorage,
    "direct": DirectStorage,
    "checking": lambda: LocalStorage().for_checking(),
    "by scheme": make_storage,
    "by scheme, direct": lambda: make_storage(direct=True),
    "wrapper": lambda: WrapperStorage(LocalStorage()),
    "wrapper that counts": lambda: CountingStorage(make_storage()),
}


class TestStorages(StorageContract):
    @pytest.fixture(autouse=True, params=STORAGES, ids=lambda name: f"[{name}]")
    def _chosen(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
        self.chosen: str = request.param
        if "direct" in self.chosen:
            skip_without_direct_reads(tmp_path)
        shared_pool("local", 1 if "one" in self.chosen else None)
        yield
        shared_pool("local", default_capacity())

    def write_files(self, folder: Path, files: Mapping[str, bytes]) -> str:
        return write_local(folder, files)

    def make_storage(self) -> Storage:
        return STORAGES[self.chosen]()


def skip_without_direct_reads(folder: Path) -> None:
    (folder / "probe").touch()
    try:
        os.close(os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the temporary folder's file system does not offer O_DIRECT")
