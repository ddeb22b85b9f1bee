"""Pages of several files that one call decodes: the same blocks and errors as file by file, and none keeps another's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megablend.errors import CorruptFileError
from megablend.formats.base import BlockReader, DecodedBlock
from megablend.formats.blocks import place_blocks
from megablend.formats.fetch import FileRead, decode_all, fetch_all
from megablend.formats.parquet.decoding.page_reader import ParquetReader
from megablend.storage.local import LocalStorage
from megablend.storage.ranges import FetchedRanges
from tests.formats.parquet.test_batches import LISTS, ROWS, reader_of, store
from tests.formats.writers import index
from tests.storages import STORAGE

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"compression": "none"},
    "zstd": {"compression": "zstd", "write_page_checksum": True},
    "v2": {"compression": "lz4", "data_page_version": "2.0"},
    "snappy": {"compression": "snappy"},
    "dictionary": {"compression": "zstd", "use_dictionary": True},
    "delta": {
        "compression": "zstd",
        "column_encoding": {"ids.list.element": "DELTA_BINARY_PACKED"},
    },
    "wide": {"kind": pa.list_(pa.int64())},
    "narrow": {"kind": pa.list_(pa.uint16())},
    "flat": {"kind": pa.int32(), "rows": list(range(2000))},
    "chunks": {
        "column_encoding": {"ids.list.element": "DELTA_BINARY_PACKED"},
        "kind": pa.list_(pa.int64()),
    },
}
"""Files; `wide`, `narrow` and `flat` are not decoded together with the others, but each with its like."""


def open_read(folder: Path, name: str, kind: str, pages: slice = slice(None)) -> FileRead:
    """A read of a file of a kind, whose bytes are fetched."""
    path = store(folder / f"{name}.parquet", **({"rows": ROWS, "kind": LISTS} | KINDS[kind]))
    found = index(path, "ids")
    read = FileRead(
        reader_of(path, found, LocalStorage()), place_blocks(found.blocks)[pages], found.chunks
    )
    fetch_all([read], STORAGE)
    return read


def blocks_of(reads: Sequence[FileRead], *, pieces: bool) -> list[DecodedBlock]:
    return [block for part in decode_all(reads, pieces=pieces) for block in part]


@pytest.mark.parametrize("pieces", [False, True])
def test_files_together_give_what_each_gives(
    tmp_path: Path, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [*KINDS, *KINDS]
    reads = [open_read(tmp_path, str(i), kind) for i, kind in enumerate(kinds)]
    chance = np.random.default_rng(0)
    for order in (np.arange(len(reads)), *(chance.permutation(len(reads)) for _ in range(8))):
        mine = [reads[i] for i in order.tolist()]
        alone = [block for read in mine for block in read.decode(pieces=pieces)]
        together = blocks_of(mine, pieces=pieces)
        assert len(together) == len(alone) > 200
        for one, other in zip(together, alone, strict=True):
            assert one.tokens.dtype == other.tokens.dtype
            assert one.tokens.tolist() == other.tokens.tolist()
            assert not pieces or one.offsets.tolist() == other.offsets.tolist()
    calls = list[int]()
    joint = ParquetReader.decode_jointly

    def count(reader: ParquetReader, files: Sequence[FileRead], *, pieces: bool) -> object:
        calls.append(len(files))
        return joint(reader, files, pieces=pieces)

    monkeypatch.setattr(ParquetReader, "decode_jointly", count)
    blocks_of(reads, pieces=pieces)
    assert calls == [6, 6]  # of the lists of int32; their neighbours are of other types


def test_blocks_in_any_order_and_twice(tmp_path: Path) -> None:
    reads = [open_read(tmp_path, "a", "zstd"), open_read(tmp_path, "b", "plain")]
    places = np.random.default_rng(1).integers(0, len(reads[1].blocks), 30)
    again = FileRead(reads[1].reader, reads[1].blocks[places], reads[1].chunks)
    fetch_all([again], STORAGE)
    expected = [[*reads[1].decode()][i].tokens.tolist() for i in places.tolist()]
    found = blocks_of([reads[0], again], pieces=True)
    assert [block.tokens.tolist() for block in found[len(reads[0].blocks) :]] == expected


@pytest.mark.parametrize("kind", ["plain", "zstd", "v2", "snappy", "dictionary", "delta"])
def test_damage_names_the_file_that_is_damaged(tmp_path: Path, kind: str) -> None:
    reads = [open_read(tmp_path, name, kind) for name in "abc"]
    damaged = reads[1]
    fetched = damaged.fetched[0]
    page = len(damaged.blocks) // 2
    begin = int(fetched.begins[page])
    wrong = fetched.buffers[0].copy()
    wrong[begin : begin + 4] = 255
    damaged.fetched[0] = FetchedRanges(fetched.ranges, [wrong], fetched.buffer_of, fetched.begins)
    with pytest.raises(CorruptFileError) as alone:
        damaged.decode()
    with pytest.raises(CorruptFileError) as together:
        blocks_of(reads, pieces=False)
    assert str(together.value) == str(alone.value)
    assert f"b.parquet at byte {damaged.blocks['offset'][page]}: " in str(alone.value)


def test_damaged_bytes_are_fetched_again_of_their_file_alone(tmp_path: Path) -> None:
    reads = [open_read(tmp_path, name, "zstd") for name in "abc"]
    expected = [block.tokens.tolist() for block in blocks_of(reads, pieces=False)]
    fetched = reads[1].fetched[0]
    torn = np.zeros_like(fetched.buffers[0])
    damaged = FileRead(reads[1].reader, reads[1].blocks, reads[1].chunks, retry_storage=STORAGE)
    damaged.fetched.append(FetchedRanges(fetched.ranges, [torn], fetched.buffer_of, fetched.begins))
    found = blocks_of([reads[0], damaged, reads[2]], pieces=False)
    assert [block.tokens.tolist() for block in found] == expected
    assert damaged.fetched[0].buffers[0].any()


def test_a_block_keeps_no_page_of_another_file(tmp_path: Path) -> None:
    reads = [open_read(tmp_path, str(i), "plain") for i in range(4)]
    before = pa.total_allocated_bytes()
    blocks = blocks_of(reads, pieces=False)
    kept = pa.total_allocated_bytes() - before
    assert kept <= sum(block.tokens.nbytes for block in blocks) * 1.2 + 64 * len(blocks)
    del blocks[1:]
    assert pa.total_allocated_bytes() - before <= 1.2 * blocks[0].tokens.nbytes + 64


def test_readers_of_other_formats_decode_their_files_one_by_one(tmp_path: Path) -> None:
    reads = [open_read(tmp_path, name, "zstd") for name in "ab"]

    class Plain:
        """A reader that can only decode its own file."""

        def __init__(self, inner: BlockReader) -> None:
            self.byte_ranges = inner.byte_ranges
            self.decode = inner.decode
            self.find_pieces = inner.find_pieces

    plain = [
        FileRead(Plain(read.reader), read.blocks, read.chunks, fetched=read.fetched)
        for read in reads
    ]
    found = blocks_of(plain, pieces=True)
    expected = blocks_of(reads, pieces=True)
    assert [block.tokens.tolist() for block in found] == [
        block.tokens.tolist() for block in expected
    ]
