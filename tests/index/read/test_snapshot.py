from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megablend.config.read_spec import ReadSpec
from megablend.errors import CacheError
from megablend.formats import FORMATS
from megablend.formats.base import PLACED_BLOCK_DTYPE
from megablend.formats.blocks import place_blocks
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.index.tables.list_snapshots import list_snapshots
from tests.index.index_data import build, spec, strip_checks, write
from tests.storages import STORAGE


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for seed in range(4):
        write(tmp_path / "data" / f"{seed}.arrow", seed)
    schema = pa.schema([("tokens", pa.list_(pa.int32()))])
    with pa.ipc.new_file(str(tmp_path / "data" / "2empty.arrow"), schema):
        pass
    build(
        tmp_path / "cache",
        spec(tmp_path / "data"),
        spec(tmp_path / "data", "1.arrow", name="rough", documents=False),
    )
    return tmp_path / "cache"


@pytest.fixture
def snapshot(cache: Path) -> Snapshot:
    return open_snapshot(str(cache), list_snapshots(str(cache))[-1])


def test_blocks_are_what_the_formats_found(snapshot: Snapshot) -> None:
    block = 0
    for i in range(snapshot.num_files):
        path = snapshot.path(i)
        entry = snapshot.files.entry(i)
        source = snapshot.columns[entry.column]
        storage = STORAGE
        found = FORMATS["arrow"].index(path, ReadSpec(), storage=storage)
        blocks = snapshot.blocks(np.arange(entry.first_block, entry.first_block + entry.num_blocks))
        assert entry.first_block == block
        expected = found.blocks.copy()
        if not source.documents:
            expected = expected[expected["tokens"] > 0]
            expected["rows"] = -1
            expected["ends"] = -1
            expected["flags"] = 0
        np.testing.assert_array_equal(blocks, place_blocks(expected))
        chunks = snapshot.chunks(entry).copy()
        assert (chunks["file"] == i).all()
        chunks["file"] = 0
        np.testing.assert_array_equal(chunks, found.chunks)
        assert (entry.rows, entry.tokens) == (found.rows, found.tokens)
        assert entry.opened.meta == found.meta
        block += entry.num_blocks
    assert block == len(snapshot.tokens_before) - 1


def test_file_of_passes_over_files_without_blocks(snapshot: Snapshot) -> None:
    # The empty file is among them
    files = [
        i for i in range(snapshot.num_files) for _ in range(snapshot.files.entry(i).num_blocks)
    ]
    np.testing.assert_array_equal(snapshot.file_of(np.arange(len(files))), files)
    assert "2empty.arrow" in {
        snapshot.files.entry(i).name for i in set(range(snapshot.num_files)) - set(files)
    }


def test_blocks_in_any_order_with_repeats_and_none(snapshot: Snapshot) -> None:
    whole = snapshot.blocks(np.arange(len(snapshot.tokens_before) - 1))
    ids = np.array([5, 0, 5, len(whole) - 1])
    np.testing.assert_array_equal(snapshot.blocks(ids), whole[ids])
    assert snapshot.blocks([]).dtype == PLACED_BLOCK_DTYPE


def test_sources_tile_files_and_blocks(snapshot: Snapshot) -> None:
    assert [source.files for source in snapshot.sources] == [range(5), range(5, 6)]
    assert snapshot.sources[0].blocks.stop == snapshot.sources[1].blocks.start
    assert snapshot.sources[1].tokens == snapshot.files.entry(1).tokens


@pytest.mark.parametrize("i", [-1, 6])
def test_a_file_out_of_range(snapshot: Snapshot, i: int) -> None:
    with pytest.raises(IndexError, match=f"file {i} is out of range: the index has 6 files"):
        snapshot.files.entry(i)


def test_a_pickled_snapshot_opens_again(snapshot: Snapshot) -> None:
    again = pickle.loads(pickle.dumps(snapshot))
    assert again.digest == snapshot.digest
    assert again.sources == snapshot.sources
    np.testing.assert_array_equal(again.tokens_before, snapshot.tokens_before)
    assert len(pickle.dumps(snapshot)) < 500


def test_arrays_are_mapped_and_read_only(snapshot: Snapshot) -> None:
    for array in (
        snapshot.tokens_before,
        snapshot.rows_before,
        snapshot.ends_before,
        snapshot.chunks(snapshot.files.entry(0)),
    ):
        assert not array.flags.writeable


def test_tables_are_arrow_files_that_other_tools_read(snapshot: Snapshot) -> None:
    with pa.memory_map(str(snapshot.folder / "blocks.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.num_rows == len(snapshot.tokens_before)
    assert table.column("tokens_before")[-1].as_py() == sum(
        source.tokens for source in snapshot.sources
    )
    assert sum(column.type.bit_width // 8 for column in table.columns) == 46


def test_no_cache_has_no_snapshots(tmp_path: Path) -> None:
    assert list_snapshots(str(tmp_path)) == []


def test_a_flipped_bit_of_the_table_of_files_is_said_at_opening(snapshot: Snapshot) -> None:
    table = snapshot.folder / "files.arrow"
    data = table.read_bytes()
    table.write_bytes(data.replace(b"int32", b"in432", 1))
    with pytest.raises(
        CacheError,
        match=r"files.arrow: damaged table: its checksum is wrong; build again to repair it",
    ):
        open_snapshot(snapshot.store.folder, snapshot.digest)
    table.write_bytes(data)


def test_a_block_of_no_chunk_of_its_file_is_refused(snapshot: Snapshot) -> None:
    strip_checks(snapshot.folder)
    table = snapshot.folder / "blocks.arrow"
    data = table.read_bytes()
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        chunks = reader.get_batch(0).column("chunk").to_numpy()
    place = data.index(chunks.tobytes())
    for chunk in (-1, int(chunks.max()) + 1, 1 << 29):
        table.write_bytes(data[:place] + np.int32(chunk).tobytes() + data[place + 4 :])
        with pytest.raises(
            CacheError,
            match=r"blocks.arrow: damaged table: a block refers to a chunk outside its file",
        ):
            open_snapshot(snapshot.store.folder, snapshot.digest).blocks([0])
    table.write_bytes(data)
