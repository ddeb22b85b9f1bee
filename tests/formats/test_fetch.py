"""Fetching ranges: which are read together, and that each owner has bytes of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megablend.formats.fetch import fetch_now
from megablend.storage.base import Allocate, Bytes, Int64s
from megablend.storage.ranges import FileRanges
from megablend.storage.wrapper import WrapperStorage
from tests.storages import STORAGE

DATA = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)


class CountedReads(WrapperStorage):
    """Counts calls."""

    reads = 0

    def read_ranges(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> tuple[Bytes, Int64s]:
        self.reads += 1
        return super().read_ranges(path, offsets, sizes, allocate)


@pytest.mark.parametrize(
    ("size", "owned", "reads"), [(1 << 16, True, 16), (1 << 16, False, 1), (1 << 12, True, 1), (1 << 12, False, 1)]
)
@pytest.mark.parametrize("is_ascending", [True, False])
def test_neighbours_of_different_owners_are_read_one_by_one_where_copying_costs_more(
    tmp_path: Path, size: int, owned: bool, reads: int, is_ascending: bool
) -> None:
    path, storage = tmp_path / "x", CountedReads(STORAGE)
    DATA.tofile(path)
    numbers = np.arange(16) if is_ascending else np.random.default_rng(1).permutation(16)
    sizes = np.full(16, size)
    fetched = fetch_now(FileRanges(str(path), numbers * size, sizes, np.arange(16) if owned else None), storage)
    for i, number in enumerate(numbers.tolist()):
        assert np.array_equal(fetched[i], DATA[number * size : (number + 1) * size])
    assert storage.reads == reads
    if owned:
        assert len({id(fetched.buffers[int(buffer)]) for buffer in fetched.buffer_of}) == 16
