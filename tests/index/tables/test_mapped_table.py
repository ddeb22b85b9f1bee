"""A mapped table gives the same rows whether it is small or large; of a large one little stays in memory."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megablend.errors import CacheError
from megablend.index.tables.mapped_table import MappedTable
from megablend.index.tables.tables import TableWriter

COLUMNS = np.dtype([("a", "<i8"), ("b", "<u1")])


class LargeTable(MappedTable):
    """Any table is large."""

    mapped_bytes = 0
    ahead_rows = 5
    region_rows = 4
    portion_regions = 2


def table_of(path: Path, rows: int, kind: type[MappedTable] = LargeTable) -> MappedTable:
    with TableWriter(path, COLUMNS) as writer:
        writer.append({"a": np.arange(rows) * 3, "b": np.arange(rows) % 251})
        writer.finish()
    return kind(path, COLUMNS)


@pytest.mark.parametrize(
    "rows", [[], [0], [99, 0, 50, 50, 3, 98], list(range(100)), list(range(99, -1, -7)), [7, 8, 9]]
)
def test_rows_of_a_large_table(tmp_path: Path, rows: list[int]) -> None:
    table = table_of(tmp_path / "t", 100)
    asked = np.array(rows, np.int64)
    for name, expected in (("a", [3 * row for row in rows]), ("b", [row % 251 for row in rows])):
        found = table.take(name, asked)
        assert found.tolist() == expected
        assert found.dtype == COLUMNS[name]
    parts = [asked[part].tolist() for part in table.portions(asked)]
    assert [row for part in parts for row in part] == rows
    assert all(len({row // 4 for row in part}) <= 2 for part in parts)


def test_long_columns_are_written_to_files(tmp_path: Path) -> None:
    """The table is the same, byte for byte, and no file of a column is left."""
    written = []
    for name, kept in (("in memory", 1 << 20), ("one in a file", 1000), ("all in files", 1)):
        with TableWriter(tmp_path / name, COLUMNS, kept_bytes=kept) as writer:
            for start in (390, 100, 0, 400):  # the first fits in memory
                numbers = np.arange(start, 400)
                writer.append({"a": numbers * 3, "b": numbers % 251})
            open_files = map(os.path.realpath, Path("/proc/self/fd").iterdir())
            parts = [path for path in open_files if path.startswith(str(tmp_path))]
            digest = writer.finish()
        written.append((parts, digest, (tmp_path / name).read_bytes()))
    assert [len(parts) for parts, _, _ in written] == [0, 1, 2]
    assert len({each[1:] for each in written}) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_long_columns_are_not_copied_in_memory(tmp_path: Path) -> None:
    a = np.zeros(1 << 21, np.int64)
    b = np.zeros(1 << 21, np.uint8)
    with TableWriter(tmp_path / "t", COLUMNS) as writer:
        tracemalloc.start()
        try:
            writer.append({"a": a, "b": b})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < a.nbytes / 2


def test_a_table_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    table = table_of(tmp_path / "t", 10_000)
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(
        CacheError, match=r"t: damaged table: it ends before byte \d+; build again to repair it"
    ):
        table.take("a", np.array([5, 9000]))


def test_threads_look_up_side_by_side(tmp_path: Path) -> None:
    table = table_of(tmp_path / "t", 200_000)
    wrong = list[int]()

    def look(seed: int) -> None:
        rows = np.random.default_rng(seed).integers(0, 200_000, 2000)
        wrong.append(int(np.count_nonzero(table.take("a", rows) != 3 * rows)))

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 4


@pytest.mark.long
def test_of_a_large_table_little_stays_in_memory(tmp_path: Path) -> None:
    table = table_of(tmp_path / "t", 10_000_000, MappedTable)  # 90 MB
    rows = np.random.default_rng(0).integers(0, 10_000_000, 20_000)
    before = mapped_bytes(tmp_path / "t")
    assert table.take("a", rows).tolist() == (3 * rows).tolist()
    assert mapped_bytes(tmp_path / "t") == before
    table["a"][rows]
    assert mapped_bytes(tmp_path / "t") > 32 << 20  # as it is otherwise


def mapped_bytes(path: Path) -> int:
    """Bytes of a mapped file that count as memory of this process."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(int(found.split()[1]) << 10 for found in lines if found.startswith("Rss:"))
    return 0
