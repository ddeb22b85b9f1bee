"""Many pages at a time: which reads are made, what the blocks keep in memory, storages without descriptors, dictionaries kept."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.config.read_spec import ReadSpec
from megablend.errors import CorruptFileError
from megablend.formats.base import PLACED_BLOCK_DTYPE, Array, BlockReader, FileIndex
from megablend.formats.fetch import read_blocks
from megablend.formats.parquet.decoding.dictionaries import DictionaryCache
from megablend.formats.parquet.decoding.headers import PART_PAGES
from megablend.formats.parquet.decoding.page_reader import ParquetReader, select_blocks
from megablend.formats.parquet.indexing.index_file import index_file
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.storage.base import Allocate, Bytes, Int64s, ReadLimits, Storage
from megablend.storage.local import LocalStorage
from megablend.storage.wrapper import WrapperStorage
from tests.formats.parquet_files import Rows, check, documents_of
from tests.formats.writers import index
from tests.storages import STORAGE

LIMITS = LocalStorage().limits("")
GAP_BYTES = LIMITS.max_gap_bytes
MERGED_BYTES = LIMITS.max_merged_bytes
LISTS = pa.list_(pa.int32())
ROWS: Rows = [None if i % 11 == 5 else list(range(i, i + i % 40)) for i in range(400)]


class Remote(WrapperStorage):
    """A storage without descriptors, which remembers what was read."""

    def __init__(self, limits: ReadLimits = LIMITS) -> None:
        super().__init__(LocalStorage())
        self.reads: list[tuple[int, int]] = []
        self._limits = limits

    def limits(self, path: str) -> ReadLimits:
        return self._limits

    def read(self, path: str, offset: int, size: int) -> bytes:
        self.reads.append((offset, size))
        return super().read(path, offset, size)

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        self.reads += zip(offsets.tolist(), sizes.tolist(), strict=True)
        return super().read_ranges(path, offsets, sizes, allocate)

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        return nullcontext(-1)


def store(path: Path, rows: Rows = ROWS, kind: pa.DataType = LISTS, **options: object) -> Path:
    settings = {
        "use_dictionary": False,
        "data_page_size": 200,
        "write_batch_size": 8,
        "row_group_size": 150,
    }
    pq.write_table(pa.table({"ids": pa.array(rows, kind)}), path, **(settings | options))
    return path


def reader_of(path: Path, found: FileIndex, storage: Storage) -> BlockReader:
    return ParquetReader(
        FileBytes(str(path), storage, path.stat().st_size), Column.from_meta(found.meta)
    )


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("page_index", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_a_storage_without_descriptors_gives_the_same(
    tmp_path: Path, version: str, page_index: bool, documents: bool
) -> None:
    path = store(
        tmp_path / "x.parquet",
        data_page_version=version,
        write_page_index=page_index,
        compression="zstd",
    )
    storage = Remote()
    found = index(path, "ids", documents=documents, storage=storage)
    expected = index(path, "ids", documents=documents)
    assert found.blocks.tobytes() == expected.blocks.tobytes()
    assert found.chunks.tobytes() == expected.chunks.tobytes()
    storage.reads.clear()
    blocks = read_blocks(reader_of(path, found, storage), found.blocks, found.chunks, storage)
    assert np.concatenate([b.tokens for b in blocks]).tolist() == [
        t for d in documents_of(ROWS) for t in d
    ]
    assert len(storage.reads) <= len(found.chunks)  # pages of a chunk follow each other


def test_walks_longer_than_what_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path / "x.parquet", [[1, 2]] * 5000, row_group_size=5000)
    expected = index(path, "ids", documents=False)
    for ahead, room in [(40, 7), (300, 1000), (1000, 1)]:
        monkeypatch.setattr("megablend.formats.parquet.decoding.headers.AHEAD_BYTES", ahead)
        monkeypatch.setattr("megablend.formats.parquet.decoding.headers.WALK_PAGES", room)
        for storage in (Remote(), LocalStorage()):
            found = index(path, "ids", documents=False, storage=storage)
            assert found.blocks.tobytes() == expected.blocks.tobytes()


def test_headers_at_known_places_are_read_by_many_threads(tmp_path: Path) -> None:
    # Nulls: the page index does not tell the rows
    rows: Rows = [[i, None] for i in range(2 * PART_PAGES + 5)]
    path = store(
        tmp_path / "x.parquet",
        rows,
        data_page_size=1,
        write_batch_size=1,
        row_group_size=10**6,
        write_page_index=True,
    )
    assert len(check(path, rows).blocks) == len(rows)


def test_chunks_of_a_large_file_are_indexed_side_by_side(tmp_path: Path) -> None:
    path = store(tmp_path / "x.parquet", row_group_size=20)
    read = ReadSpec(column="ids", count_documents=True)
    expected = index_file(str(path), read, STORAGE)
    assert (
        index_file(str(path), read, STORAGE, threaded_bytes=0).blocks.tobytes()
        == expected.blocks.tobytes()
    )
    data = bytearray(path.read_bytes())
    place = int(expected.blocks["offset"][len(expected.blocks) // 2])
    data[place : place + 4] = b"\xff" * 4
    path.write_bytes(data)
    with pytest.raises(
        CorruptFileError, match=f"{path} at byte {place}: the page header is damaged"
    ):
        index_file(str(path), read, STORAGE, threaded_bytes=0)


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BINARY_PACKED"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("together", [False, True])
def test_a_block_keeps_no_more_than_its_page(
    tmp_path: Path, encoding: str, codec: str, together: bool
) -> None:
    path = store(
        tmp_path / "x.parquet",
        [list(range(200))] * 40,
        data_page_size=4000,
        column_encoding={"ids.list.element": encoding},
        compression=codec,
    )
    found = index(path, "ids")
    asked: Array = found.blocks if together else found.blocks[:1]
    before = pa.total_allocated_bytes()
    blocks = read_blocks(reader_of(path, found, LocalStorage()), asked, found.chunks, STORAGE)
    kept = pa.total_allocated_bytes() - before
    assert kept <= sum(block.tokens.nbytes for block in blocks) * 1.2 + 64 * len(blocks)
    one = blocks[0]
    del blocks
    assert pa.total_allocated_bytes() - before <= one.tokens.nbytes * 1.2 + 64


def test_blocks_larger_than_what_is_worked_on_at_once(tmp_path: Path) -> None:
    path = store(tmp_path / "x.parquet", compression="zstd")
    small = Remote(dataclasses.replace(LIMITS, max_merged_bytes=500))
    found = check(path, ROWS, storage=small)
    reads = list[int]()
    for batch_bytes in (1 << 20, 1000):
        small.reads.clear()
        reader = reader_of(path, found, small)
        blocks = read_blocks(reader, found.blocks, found.chunks, small, batch_bytes=batch_bytes)
        assert np.concatenate([b.tokens for b in blocks]).tolist() == [
            t for d in documents_of(ROWS) for t in d
        ]
        reads.append(len(small.reads))
    assert 10 < reads[0] <= reads[1]


def test_of_thousands_of_columns_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    others = {f"c{i}": pa.array([0.5, 1.5]) for i in range(2000)}
    pq.write_table(
        pa.table({"ids": pa.array([[1, 2], [3]], LISTS), **others}), path, row_group_size=1
    )
    check(path, [[1, 2], [3]], "ids")


def test_dictionaries_are_kept_within_bytes() -> None:
    cache = DictionaryCache(1000)
    loads = []

    def get(number: int, size: int = 50) -> Array:
        def load() -> Array:
            loads.append(number)
            return np.full(size, number, np.int64)

        return cache.get((0, number), load)

    assert [int(get(i)[0]) for i in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert loads == [1, 2]
    get(1)
    get(3)  # 400 bytes each: 2 leaves, which was used least recently
    assert [int(get(i)[0]) for i in (1, 3, 2)] == [1, 3, 2]
    assert loads == [1, 2, 3, 2]
    get(4, size=10_000)
    get(4)
    get(1)
    assert loads == [1, 2, 3, 2, 4, 1]
    get(2)
    cache.resize(700)  # of 800
    assert [int(get(i)[0]) for i in (2, 1)] == [2, 1]
    assert loads == [1, 2, 3, 2, 4, 1, 2, 1]


def test_a_dictionary_that_two_threads_want_is_loaded_once() -> None:
    cache = DictionaryCache(1000)
    loads = []
    started = threading.Event()
    go_on = threading.Event()

    def load() -> Array:
        loads.append(1)
        started.set()
        go_on.wait(240)
        return np.arange(3)

    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(cache.get, (0, 0), load)]
        started.wait(240)
        found.append(threads.submit(cache.get, (0, 0), load))
        time.sleep(0.05)
        go_on.set()
        assert [each.result(240).tolist() for each in found] == [[0, 1, 2]] * 2
    assert loads == [1]


def test_a_dictionary_that_cannot_be_loaded_is_asked_for_again() -> None:
    cache = DictionaryCache(1000)

    def fail() -> Array:
        raise CorruptFileError("x", "damaged")

    for _ in range(2):
        with pytest.raises(CorruptFileError, match="damaged"):
            cache.get((0, 0), fail)
    assert cache.get((0, 0), lambda: np.ones(1)).tolist() == [1]


def test_threads_load_dictionaries() -> None:
    cache = DictionaryCache(200)
    wrong = []

    def work(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, 9, 300).tolist():
            found = cache.get((1, number), lambda number=number: np.full(10, number))  # type: ignore[misc]
            if found[0] != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("offsets", [[4, 4], [4, 4, 8], [8, 4, 8], [4, 8]])
def test_a_block_that_is_requested_twice_is_selected_once(offsets: list[int]) -> None:
    blocks = np.zeros(len(offsets), PLACED_BLOCK_DTYPE)
    blocks["offset"] = offsets
    selected, places = select_blocks(blocks)
    assert selected["offset"].tolist() == sorted(set(offsets))
    assert selected["offset"][places].tolist() == offsets
