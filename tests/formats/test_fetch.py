"""Fetching ranges: which are read together, and that each owner has bytes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.config.read_spec import ReadSpec
from megablend.formats import fetch
from megablend.formats.base import OpenedFile
from megablend.formats.blocks import place_blocks
from megablend.formats.fetch import fetch_now
from megablend.formats.parquet import PARQUET
from megablend.storage.base import Allocate, Bytes, Int64s, Storage
from megablend.storage.ranges import FileRanges
from megablend.storage.wrapper import WrapperStorage
from tests.storages import STORAGE

DATA = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)


class CountedReads(WrapperStorage):
    """Counts calls."""

    reads = 0

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        self.reads += 1
        return super().read_ranges(path, offsets, sizes, allocate)


@pytest.mark.parametrize(
    ("size", "owned", "reads"),
    [(1 << 16, True, 16), (1 << 16, False, 1), (1 << 12, True, 1), (1 << 12, False, 1)],
)
@pytest.mark.parametrize("is_ascending", [True, False])
def test_neighbours_of_different_owners_are_read_one_by_one_where_copying_costs_more(
    tmp_path: Path, size: int, owned: bool, reads: int, is_ascending: bool
) -> None:
    path = tmp_path / "x"
    storage = CountedReads(STORAGE)
    DATA.tofile(path)
    numbers = np.arange(16) if is_ascending else np.random.default_rng(1).permutation(16)
    sizes = np.full(16, size)
    fetched = fetch_now(
        FileRanges(str(path), numbers * size, sizes, np.arange(16) if owned else None), storage
    )
    for i, number in enumerate(numbers.tolist()):
        assert np.array_equal(fetched[i], DATA[number * size : (number + 1) * size])
    assert storage.reads == reads
    if owned:
        assert len({id(fetched.buffers[int(buffer)]) for buffer in fetched.buffer_of}) == 16


def test_pages_far_smaller_than_their_tokens_are_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.parquet"
    rows = [[5] * 100_000] * 4
    pq.write_table(
        pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}), path, row_group_size=1
    )
    found = PARQUET.index(str(path), ReadSpec(), storage=STORAGE)
    assert found.blocks["decoded_bytes"].max() < 4_000
    size = path.stat().st_size
    opened = OpenedFile(
        size=size, token_dtype=found.token_dtype, structure=found.structure, meta=found.meta
    )
    reader = PARQUET.open(str(path), None, opened, storage=STORAGE)
    batches = list[int]()
    fetch_all = fetch.fetch_all

    def count(reads: Sequence[fetch.FileRead], storage: Storage) -> None:
        batches.extend(len(each.blocks) for each in reads)
        fetch_all(reads, storage)

    monkeypatch.setattr(fetch, "fetch_all", count)
    decoded = fetch.read_blocks(
        reader, place_blocks(found.blocks), found.chunks, STORAGE, batch_bytes=400_000
    )
    assert [each.tokens.tolist() for each in decoded] == rows
    assert batches == [1] * 4
