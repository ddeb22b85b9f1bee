"""Reads past the page cache give the same bytes, wherever ranges begin and end, and are refused where there are none."""

import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megablend
from megablend.errors import CorruptFileError, DataError, MissingFileError
from megablend.storage.base import Bytes
from megablend.storage.descriptors import DescriptorPool, OpenedFiles, shared_pool
from megablend.storage.direct import DirectStorage
from megablend.storage.local import LocalStorage
from tests.runs import documents, make_config, write_source

CONTENT = random.Random(3).randbytes(4096 * 5 + 1234)


def allocate(size: int) -> Bytes:
    return np.empty(size + 1, np.uint8)[1:]  # memory that is not aligned


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "x"
    path.write_bytes(CONTENT)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the temporary folder's file system does not offer O_DIRECT")
    return str(path)


@pytest.mark.parametrize("storage", [LocalStorage(), DirectStorage()])
@pytest.mark.parametrize("seed", range(4))
def test_ranges_are_slices(path: str, storage: LocalStorage, seed: int) -> None:
    rng = random.Random(seed)
    places = [
        0,
        1,
        4095,
        4096,
        4097,
        len(CONTENT) - 1,
        len(CONTENT),
        *(rng.randrange(len(CONTENT)) for _ in range(9)),
    ]
    ranges = [(start, rng.randrange(len(CONTENT) - start + 1)) for start in places] + [
        (0, len(CONTENT))
    ]
    offsets, sizes = np.array(ranges).T.copy()
    out, begins = storage.read_ranges(path, offsets, sizes, allocate)
    for (offset, size), begin in zip(ranges, begins.tolist(), strict=True):
        assert out[begin : begin + size].tobytes() == CONTENT[offset : offset + size]


@pytest.mark.parametrize("storage", [LocalStorage(), DirectStorage()])
def test_a_range_beyond_the_end_is_refused(path: str, storage: LocalStorage) -> None:
    offsets = np.array([5, len(CONTENT) - 3])
    sizes = np.array([9, 4])
    with pytest.raises(
        CorruptFileError,
        match=rf"x at byte {len(CONTENT) - 3}: is truncated \(expected 4 bytes .* {len(CONTENT)}",
    ):
        storage.read_ranges(path, offsets, sizes, allocate)
    with pytest.raises(MissingFileError, match="no such file"):
        storage.read_ranges(path + "y", offsets, sizes, allocate)


def test_reads_that_return_less_are_completed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on FUSE file systems with `direct_io`: a read may end before the file does, at any byte."""
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: min(preadv(fd, buffers, offset), 1000)
    )
    monkeypatch.setattr("megablend.storage.direct.fill_ranges", lambda *given: range(len(given[1])))
    offsets = np.array([5, 4096])
    sizes = np.array([9000, len(CONTENT) - 4096])
    out, begins = DirectStorage().read_ranges(path, offsets, sizes, allocate)
    for offset, size, begin in zip(offsets, sizes, begins, strict=True):
        assert out[begin : begin + size].tobytes() == CONTENT[offset : offset + size]


def test_a_file_system_without_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(DescriptorPool):
        def borrow(self, path: str, opened: OpenedFiles) -> Any:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    with pytest.raises(DataError, match=r"does not support O_DIRECT; set direct_io: false"):
        DirectStorage(direct_pool=Refusing(1)).read_ranges(
            str(tmp_path), np.zeros(1, np.int64), np.ones(1, np.int64), allocate
        )


def test_a_run_reads_the_same(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path, 0, "parquet", documents(0, 200, 60, seed=1))
    config = make_config(tmp_path, [source | {"weight": 1}], samples=100)
    megablend.build(config)
    seen: list[str] = []
    borrow = DescriptorPool.borrow

    def counted(pool: DescriptorPool, path: str, opened: OpenedFiles) -> Any:
        seen.append(path) if pool is shared_pool("direct") else None
        return borrow(pool, path, opened)

    monkeypatch.setattr(DescriptorPool, "borrow", counted)
    plain, direct = (
        [
            batch["tokens"]
            for batch in megablend.Loader(megablend.open(config | settings), micro_batch_size=4)
        ]
        for settings in ({}, {"direct_io": True})
    )
    assert {Path(name).suffix for name in seen} == {".parquet"}
    assert all(a.equal(b) for a, b in zip(plain, direct, strict=True))
