"""Totals of groups of blocks are what counting gives, are kept, and are not trusted where they are damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.errors import CacheError
from megablend.index.blocks.splits import PART_DTYPE, SplitBlocks
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.ranged_blocks import count_groups, store_totals
from tests.examples import examples
from tests.index.index_data import build, spec, write


@examples(60)
@given(
    st.lists(st.integers(0, 9), max_size=60),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 40),
)
def test_totals_are_sums_over_blocks(
    sizes: list[int], num_groups: int, run: int, in_a_pass: int
) -> None:
    expected = [0] * num_groups
    for block, size in enumerate(sizes):
        expected[block // run % num_groups] += size
    running = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    found = count_groups(
        lambda blocks: running[blocks], len(sizes), num_groups, run, blocks_per_pass=in_a_pass
    )
    assert found.tolist() == expected


@pytest.fixture
def blocks(tmp_path: Path) -> SplitBlocks:
    """All of a source but some tokens of its first and last blocks."""
    for seed in range(6):
        write(tmp_path / "data" / f"{seed}.arrow", seed)
    snapshot = open_snapshot(
        tmp_path / "cache", build(tmp_path / "cache", spec(tmp_path / "data")).digest
    )
    source = snapshot.sources[0]
    part = np.zeros(1, PART_DTYPE)[0]
    last = int(snapshot.blocks([source.blocks.stop - 1])["tokens"][0])
    tokens = source.tokens + source.ends - 5
    part["first_block"] = 0
    part["stop_block"] = source.blocks.stop
    part["skip"] = 5
    part["tokens"] = tokens
    part["keep"] = last + int(snapshot.blocks([source.blocks.stop - 1])["ends"][0])
    return SplitBlocks(snapshot, part, has_eod=True)


def test_a_part_counts_what_it_has_and_keeps_it(
    blocks: SplitBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = np.diff(blocks.before(np.arange(blocks.num_blocks + 1)))
    expected = [
        int(sizes[[b for b in range(len(sizes)) if b // 2 % 3 == group]].sum())
        for group in range(3)
    ]
    assert blocks.group_totals(3, 2).tolist() == expected
    assert sum(expected) == blocks.num_tokens
    blocks.keep_group_totals(3, 2)
    monkeypatch.setattr(
        "megablend.index.tables.ranged_blocks.count_groups",
        lambda *args: pytest.fail("counted again"),
    )
    blocks.keep_group_totals(3, 2)
    assert blocks.group_totals(3, 2).tolist() == expected


def test_damaged_totals_are_counted_again(blocks: SplitBlocks) -> None:
    expected = blocks.group_totals(3, 2).tolist()
    blocks.keep_group_totals(3, 2)
    (path,) = (blocks.snapshot.store.folder / "splits").iterdir()
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    for damaged in (bytes(data), bytes(data[:-1]), b""):
        path.write_bytes(damaged)
        assert blocks.group_totals(3, 2).tolist() == expected
    path.unlink()
    assert blocks.group_totals(3, 2).tolist() == expected


def test_totals_are_named_by_all_that_they_depend_on(tmp_path: Path) -> None:
    int64 = np.dtype(np.int64)
    store_totals(tmp_path, "a", [1]).keep(np.arange(4))
    kept = store_totals(tmp_path, "a", [1]).find(int64, 4)
    assert kept is not None
    assert kept.tolist() == [0, 1, 2, 3]
    assert store_totals(tmp_path, "a", [2]).find(int64, 4) is None
    assert store_totals(tmp_path, "a", [1]).find(int64, 5) is None


def test_totals_that_cannot_be_written_are_an_error_that_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "splits").write_bytes(b"")
    with pytest.raises(CacheError, match=r"splits.*: cannot write the cache"):
        store_totals(tmp_path, "a", []).keep(np.arange(4))
