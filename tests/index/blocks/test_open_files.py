"""Builds open a bounded number of files, and say what to do where that is still too many; readers open each file once."""

from __future__ import annotations

import json
import resource
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megablend.errors import CacheError, DataError
from megablend.index.blocks.open_files import OpenedReader, OpenFiles
from megablend.index.read.snapshot import open_snapshot
from megablend.storage.base import FileStat
from megablend.storage.descriptors import default_capacity, shared_pool
from megablend.storage.local import LocalStorage
from megablend.storage.wrapper import WrapperStorage
from megablend.system.atomic_write import replace_file
from tests.index.build.test_file_parts import write_groups
from tests.index.index_data import ROOT, build, driver, environment, spec, write


def build_with(limit: int, cache: Path, *sources: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        driver(0, cache, *sources),
        env=environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        check=False,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for i in range(300):
        write(folder / f"{i}.arrow", i)
    for i in range(3):
        write_groups(folder / f"{i}.parquet", seed=i)
    return folder


@pytest.mark.long
def test_many_files_are_indexed_with_few_open(data: Path, tmp_path: Path) -> None:
    done = build_with(64, tmp_path / "cache", f"a={data}/*.arrow", f"p={data}/*.parquet")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["read"] == 303
    whole = build(tmp_path / "whole", spec(data, name="a"), spec(data, "*.parquet", name="p"))
    assert report["digest"] == whole.digest


def test_too_few_open_files_are_named(data: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared_pool("local", 0)  # none that is open serves
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(
            CacheError,
            match=r"\(Too many open files\); raise the limit of 0 open files \(`ulimit -n 1024`\)",
        ):
            replace_file(tmp_path / "x", b"")
        with pytest.raises(
            DataError,
            match=r"Too many open files; raise the limit of 0 open files \(`ulimit -n 1024`\)",
        ):
            LocalStorage().read(str(data / "1.arrow"), 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        shared_pool("local", default_capacity())


class Counting(WrapperStorage):
    """A storage that counts how often states of opened files are asked for."""

    opened = 0

    def stat_opened(self, path: str) -> FileStat:
        self.opened += 1
        return super().stat_opened(path)


def test_threads_that_need_a_file_at_the_same_time_open_it_once(tmp_path: Path) -> None:
    write(tmp_path / "1.arrow", 1)
    report = build(tmp_path / "cache", spec(tmp_path))
    storage = Counting(LocalStorage())
    snapshot = open_snapshot(str(tmp_path / "cache"), report.digest)
    files = OpenFiles(snapshot, {}, storage)
    together = threading.Barrier(8)

    def open_file(_: int) -> OpenedReader:
        together.wait(60)
        return files.get(0)

    with ThreadPoolExecutor(8) as threads:
        opened = list(threads.map(open_file, range(8)))
    assert storage.opened == 1
    assert all(each is opened[0] for each in opened)
