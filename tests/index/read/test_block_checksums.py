"""Checksums of blocks: which ranges of a read are compared, what is read again, and what a damaged table says."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.errors import CacheError, CorruptFileError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.open_files import MAX_READS
from megablend.index.read.block_checksums import (
    RANGE_COLUMNS,
    BlockChecksums,
    find_differences,
    find_folder,
    find_wrong,
    open_checksums,
)
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.file_versions import sampled_content_digest
from megablend.index.tables.table_folder import is_complete
from megablend.storage.base import Allocate, Bytes, Int64s, Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.wrapper import WrapperStorage
from megablend.testing.moved import MovedStorage
from tests.pairs import write_pair

ROWS = [[i, i + 1, i + 2] for i in range(400)]
DATA = np.arange(100, dtype=np.uint8)


def sums_of(*ranges: tuple[int, int]) -> np.ndarray[Any, Any]:
    found = [
        (offset, size, zlib.crc32(DATA[offset : offset + size].data)) for offset, size in ranges
    ]
    return np.array(found, RANGE_COLUMNS)


def test_ranges_within_a_read_are_compared() -> None:
    sums = sums_of((0, 10), (20, 30), (50, 50))
    assert find_wrong(sums, 0, DATA) == []
    damaged = DATA.copy()
    damaged[[9, 20, 49, 99]] ^= 1
    assert find_wrong(sums, 0, damaged) == [(0, 10), (20, 30), (50, 50)]
    assert find_wrong(sums, 20, damaged[20:50]) == [(0, 30)]
    assert find_wrong(sums, 50, damaged[50:]) == [(0, 50)]
    assert find_wrong(sums, 20, damaged[20:49]) == []  # not all of a range
    assert find_wrong(sums, 21, damaged[21:]) == [(29, 50)]
    damaged = DATA.copy()
    damaged[15] ^= 1  # in no range
    assert find_wrong(sums, 0, damaged) == []


class FlippingStorage(WrapperStorage):
    """Flips a bit at `places` in the first `flips` reads of each."""

    def __init__(self, inner: Storage, flips: int) -> None:
        super().__init__(inner)
        self.flips = flips
        self.places = list[int]()
        self.reads = Counter[int]()

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        data, begins = super().read_ranges(path, offsets, sizes, allocate)
        data = data.copy()
        for offset, size, begin in zip(
            offsets.tolist(), sizes.tolist(), begins.tolist(), strict=True
        ):
            for place in self.places:
                if offset <= place < offset + size:
                    self.reads[place] += 1
                    if self.reads[place] <= self.flips:
                        data[begin + place - offset] ^= 4
        return data, begins


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A run with an extra column, over a file of several row groups."""
    (tmp_path / "data").mkdir()
    table = pa.table({"ids": ROWS, "mask": [[token % 2 for token in row] for row in ROWS]})
    pq.write_table(table, tmp_path / "data" / "a.parquet", row_group_size=100, compression="none")
    source = {
        "name": "a",
        "path": f"{tmp_path}/data/*.parquet",
        "column": "ids",
        "extra_columns": ["mask"],
        "epochs": 1,
    }
    given = {"cache": str(tmp_path / "cache"), "sequence_length": 8, "sources": [source]}
    megablend.build(given, checksums=True)
    return given


def open_moved(config: dict[str, Any], flips: int) -> tuple[BlockStore, FlippingStorage]:
    """The blocks of its index, as if the files were not on a local disk; their footers have been read."""
    snapshot = megablend.open_index(config["cache"]).snapshot
    storage = FlippingStorage(MovedStorage(make_storage()), 0)
    root = str(Path(config["sources"][0]["path"]).parent)
    store = BlockStore(snapshot, roots={"a": f"moved:/{root}"}, storage=storage)
    for number in range(snapshot.num_files):
        store._files.get(number)
    blocks = snapshot.blocks(blocks_of_tokens(store))
    storage.places = (blocks["offset"] + blocks["stored_bytes"] // 2).tolist()
    storage.flips = flips
    return store, storage


def blocks_of_tokens(store: BlockStore) -> Int64s:
    """The blocks of the column of tokens, not those of the other column between them."""
    return np.arange(store.snapshot.files.entry(0).num_blocks)


@pytest.mark.parametrize("flips", [0, 1, MAX_READS - 1])
def test_what_differs_is_read_again(config: dict[str, Any], flips: int) -> None:
    plain = megablend.open_index(config["cache"])
    store, storage = open_moved(config, flips)
    everything = blocks_of_tokens(store)
    assert (
        store.read_blocks(everything).tokens.tolist()
        == plain.read_blocks(everything).tokens.tolist()
    )
    assert set(storage.reads.values()) == {flips + 1}
    assert set(storage.reads) == set(storage.places)


def test_what_differs_each_time_is_an_error(config: dict[str, Any]) -> None:
    store, storage = open_moved(config, MAX_READS)
    says = rf"a\.parquet at byte \d+: \d+ bytes differ from their checksum in the index, {MAX_READS} times in a row"
    with pytest.raises(CorruptFileError, match=says):
        store.read_blocks(blocks_of_tokens(store))
    assert max(storage.reads.values()) == MAX_READS


@pytest.mark.parametrize("remedy", ["restore the file", "make the checksums again"])
def test_a_remedy_of_checksums_that_differ(config: dict[str, Any], remedy: str) -> None:
    path = Path(config["cache"]).parent / "data" / "a.parquet"
    before = path.read_bytes()
    stat = path.stat()
    store, _ = open_moved(config, 0)
    expected = store.read_blocks(blocks_of_tokens(store)).tokens.tolist()
    block = store.snapshot.blocks(np.array([0]))[0]
    at = int(block["offset"] + block["stored_bytes"]) - 3
    write_in_place(path, before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :], stat)
    says = r"restore the file, or, if the checksums are those of a wrong file, remove the cache's folder `(\w+)` and run "
    with pytest.raises(
        CorruptFileError, match=f"{says}`megablend build CONFIG --checksums`"
    ) as caught:
        store.read_blocks(blocks_of_tokens(store))
    if remedy == "restore the file":
        write_in_place(path, before, stat)
    else:
        folder = re.search(says, str(caught.value))
        assert folder
        shutil.rmtree(Path(config["cache"]) / folder[1])
        megablend.build(config, checksums=True)
    store, _ = open_moved(config, 0)
    found = store.read_blocks(blocks_of_tokens(store)).tokens.tolist()
    assert len(found) == len(expected)
    assert found == expected or remedy != "restore the file"


def change_outside_the_samples(
    folder: Path, *, checksums: bool
) -> tuple[dict[str, Any], Path, bytes, int]:
    """A run over a raw file that another one has replaced, equal where an opened file is compared.

    Returns: its config; the file, its content before, and the number of a sample that contains what differs.
    """
    path = folder / "a.bin"
    tokens = np.random.default_rng(1).integers(0, 1000, 1 << 20, dtype=np.uint16)
    tokens.tofile(path)
    source = {
        "name": "a",
        "path": str(path),
        "format": "raw",
        "format_options": {"dtype": "uint16"},
    }
    given: dict[str, Any] = {
        "cache": str(folder / "cache"),
        "sequence_length": 8,
        "sources": [source],
        "samples": 1000,
        "order": "sequential",
    }
    megablend.build(given, checksums=checksums)
    before = path.read_bytes()
    file = megablend.open_index(given["cache"]).snapshot.files.entry(0)
    for at in range(5000, len(before), 5000):
        other = folder / "other"
        other.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
        if sampled_content_digest(str(other), len(before), make_storage()) == file.body:
            break
    other.replace(path)
    return given, path, before, at // 2


def tokens_at(cache: str, place: int) -> int:
    """A token of the only file of an index."""
    store = megablend.open_index(cache)
    blocks = np.arange(store.snapshot.num_blocks)
    return int(store.read_blocks(blocks).tokens[place])


@pytest.mark.parametrize("restored", ["content", "checksums"])
def test_checksums_decide_about_local_files_that_were_replaced(
    restored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, path, before, place = change_outside_the_samples(tmp_path, checksums=True)
    says = rf"{path} at byte \d+: \d+ bytes differ from their checksum in the index, .* times in a row; restore the file"
    with pytest.raises(CorruptFileError, match=says):
        tokens_at(given["cache"], place)
    (record,) = (each for each in caplog.records if "moved, copied or touched" in each.getMessage())
    assert (
        "; other blocks are compared when they are read, or all now by `megablend verify"
        in record.getMessage()
    )
    (problem,) = megablend.verify(given["cache"], data=True).problems
    assert re.search(
        rf"{path} at byte \d+: 1 of \d+ ranges differ from their checksums in the index; restore the file",
        problem,
    )
    if restored == "content":
        path.write_bytes(before)
    else:
        shutil.rmtree(Path(given["cache"]) / "checksums")
        megablend.build(given, checksums=True)
    token = tokens_at(given["cache"], place)
    assert (token == np.frombuffer(before, np.uint16)[place]) == (restored == "content")
    assert megablend.verify(given["cache"], data=True).problems == ()


def test_without_checksums_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, _, _, place = change_outside_the_samples(tmp_path, checksums=False)
    tokens_at(given["cache"], place)
    says = "are unchanged; nothing more is compared"
    assert any(says in record.getMessage() for record in caplog.records)


def test_the_file_of_a_pair_that_differs_is_named(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [5, 7, 2])
    source = {"name": "a", "path": f"{prefix}.bin"}
    given = {
        "cache": str(tmp_path / "cache"),
        "sequence_length": 4,
        "sources": [source],
        "samples": 3,
    }
    megablend.build(given, checksums=True)
    snapshot = megablend.open_index(str(given["cache"])).snapshot
    sums = BlockChecksums(snapshot).of_file(0)
    assert not list(find_differences(snapshot, 0, f"{prefix}.bin", sums, make_storage()))
    for number, suffix in ((0, "bin"), (-1, "idx")):
        wrong = sums.copy()
        wrong["crc32"][number] ^= 1
        (problem,) = find_differences(snapshot, 0, f"{prefix}.bin", wrong, make_storage())
        assert re.search(
            rf"^{prefix}\.{suffix} at byte \d+: 1 of {len(sums)} ranges differ", problem
        )


def test_checksums_are_read_once_by_verify(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once a file, of which there may be many."""
    opened = list[Path]()

    def count(snapshot: Snapshot) -> BlockChecksums | None:
        opened.append(snapshot.folder)
        return open_checksums(snapshot)

    monkeypatch.setattr("megablend.index.verify.verify_data.open_checksums", count)
    assert megablend.verify(config["cache"], data=True).problems == ()
    assert len(opened) == 1 < megablend.open_index(config["cache"]).snapshot.num_files


def write_in_place(path: Path, data: bytes, stat: os.stat_result) -> None:
    """Change a file so that only checksums of its content show that."""
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_each_column_has_ranges_of_its_own(config: dict[str, Any]) -> None:
    snapshot = megablend.open_index(config["cache"]).snapshot
    assert snapshot.num_files == 2  # one for each column
    sums = [BlockChecksums(snapshot).of_file(number) for number in (0, 1)]
    data = np.fromfile(snapshot.path(0), np.uint8)
    for each, other in zip(sums, reversed(sums), strict=True):
        assert len(each) >= 4
        assert not set(each.tolist()) & set(other.tolist())
        assert find_wrong(each, 0, data) == []


def test_damaged_checksums_are_removed_and_made_again(config: dict[str, Any]) -> None:
    snapshot = megablend.open_index(config["cache"]).snapshot
    folder = find_folder(snapshot)
    assert is_complete(folder)
    table = folder / "ranges.arrow"
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    assert not is_complete(folder)
    with pytest.raises(CacheError) as caught:
        open_moved(config, 0)
    named = re.search(
        r"damaged.*; remove (\S+) and run `megablend build CONFIG --checksums` to recompute them",
        str(caught.value),
    )
    assert named, str(caught.value)
    shutil.rmtree(named[1])
    megablend.build(config, checksums=True)
    assert is_complete(folder)
    store, _ = open_moved(config, 1)
    assert len(store.read_blocks([0]).tokens)
