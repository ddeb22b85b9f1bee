"""Remedies in messages about locations, storages and formats of other packages: each is done as its message says."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

import megablend
from megablend.errors import ConfigError, DataError, MegablendError
from megablend.formats import FORMATS
from megablend.storage.by_scheme import make_storage
from megablend.storage.registry import STORAGES
from tests.runs import documents, make_config, write_source

STORAGE = """
from megablend.testing.moved import MovedStorage
from megablend.storage.registry import STORAGES
def make(options):
    return MovedStorage(STORAGES[""](options))
"""


def test_a_url_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123")
    with pytest.raises(ConfigError, match="write a plain path, without file://"):
        make_storage().read(f"file://{tmp_path}/x", 0, 4)
    assert make_storage().read(f"{tmp_path}/x", 0, 4) == b"0123"


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system without O_DIRECT."""
    folder = tmp_path / "ram"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "ramfs", "none", str(folder)], check=False, capture_output=True
    ).returncode:
        pytest.skip("this user cannot mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_direct_reads_where_there_are_none(ramfs: Path) -> None:
    source = write_source(ramfs, 0, "parquet", documents(0, 60, 30, seed=4)) | {"weight": 1}
    config = make_config(ramfs, [source], samples=20)
    megablend.build(config)
    with pytest.raises(
        DataError, match="its file system does not support O_DIRECT; set direct_io: false"
    ):
        megablend.open(config | {"direct_io": True})[0]
    assert len(megablend.open(config | {"direct_io": False})[0]["tokens"]) == 8


class Package:
    """An installed package with an entry point."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.information = folder / "megablend_odd-1.0.dist-info"
        folder.mkdir()

    def install(self, group: str, name: str, code: str) -> None:
        self.information.mkdir()
        (self.information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: megablend-odd\nVersion: 1.0\n"
        )
        (self.information / "entry_points.txt").write_text(
            f"[{group}]\n{name} = megablend_odd_{name}:make\n"
        )
        self.write(name, code)

    def write(self, name: str, code: str) -> None:
        (self.folder / f"megablend_odd_{name}.py").write_text(code)
        sys.modules.pop(f"megablend_odd_{name}", None)  # of another test
        importlib.invalidate_caches()

    def uninstall(self) -> None:
        for path in self.information.iterdir():
            path.unlink()
        self.information.rmdir()
        importlib.invalidate_caches()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with mock.patch.dict(STORAGES), mock.patch.dict(FORMATS):
        yield Package(tmp_path / "site")


def test_a_storage_that_cannot_be_loaded(tmp_path: Path, package: Package) -> None:
    (tmp_path / "x").write_bytes(b"0123")
    package.install("megablend.storages", "moved", "import no_such_module")
    says = r"moved://: its storage .* cannot be loaded \(ModuleNotFoundError: .*\); fix the package that provides it$"
    with pytest.raises(ConfigError, match=says):
        make_storage().read(f"moved:/{tmp_path}/x", 0, 4)
    package.write("moved", STORAGE)
    assert make_storage().read(f"moved:/{tmp_path}/x", 0, 4) == b"0123"


BROKEN = r"format 'tokens': .* cannot be loaded .*; fix the package that provides it, or uninstall it if no file has this format$"


def test_a_format_that_cannot_be_loaded(tmp_path: Path, package: Package) -> None:
    path = tmp_path / "a.tokens"
    table = pa.table({"ids": [[1, 2, 3]] * 90})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    config = make_config(tmp_path, [{"name": "a", "path": str(path)}], samples=20)
    package.install("megablend.formats", "tokens", "import no_such_module_either")
    with pytest.raises(MegablendError, match=BROKEN):
        megablend.build(config)
    package.write("tokens", "from tests.formats.test_registry import TOKENS as make")
    megablend.build(config)
    assert len(megablend.open(config)[0]["tokens"]) == 8


def test_a_package_that_is_not_needed(tmp_path: Path, package: Package) -> None:
    """The suffixes of all formats are needed to say which pattern fits a folder."""
    source = write_source(tmp_path, 0, "parquet", documents(0, 60, 30, seed=4))
    folder = str(Path(source["path"]).parent)
    config = make_config(tmp_path, [source | {"path": folder}], samples=20)
    package.install("megablend.formats", "tokens", "import no_such_module_either")
    with pytest.raises(MegablendError, match=BROKEN):
        megablend.build(config)
    package.uninstall()
    with pytest.raises(MegablendError, match="specify its files as"):
        megablend.build(config)
