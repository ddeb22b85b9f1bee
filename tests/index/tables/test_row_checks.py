"""Rows of a snapshot's tables are verified as they are taken: a flipped bit never gives other tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megablend.errors import CacheError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables import row_checks as checked
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.index.tables.mapped_table import MappedTable
from megablend.index.tables.tables import BLOCK_COLUMNS
from megablend.index.verify.verify import verify
from tests.index.index_data import build, spec, strip_checks, write
from tests.storages import STORAGE

TABLES = ["blocks.arrow", "chunks.arrow", "blocks.check.arrow", "chunks.check.arrow"]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for seed in range(3):
        write(tmp_path / "data" / f"{seed}.arrow", seed)
    build(tmp_path / "cache", spec(tmp_path / "data"))
    return tmp_path / "cache"


def folder_of(cache: Path) -> Path:
    return cache / "generations" / list_snapshots(str(cache))[-1]


def everything(cache: Path) -> list[list[int]]:
    """All that is read through an index: tokens with ends of documents, counts, sizes, places in the chunks."""
    snapshot = open_snapshot(cache, folder_of(cache).name)
    store = BlockStore(snapshot, (1000,), storage=STORAGE)
    ids = np.arange(snapshot.num_blocks)
    pages = store.read_blocks(ids)
    sizes = store.memory_bytes(ids, snapshot.blocks(ids), documents=True)
    found = [pages.tokens, pages.offsets, store.num_tokens(ids), *sizes]
    found += [snapshot.running("rows_before", ids + 1), *store.dictionaries(ids)]
    found.append(
        snapshot.find_blocks(
            "tokens_before", range(snapshot.num_blocks), np.arange(snapshot.sources[0].tokens)
        )
    )
    return [each.tolist() for each in found]


def flipped(path: Path, bits: list[int], see: Callable[[], object]) -> int:
    """How many of the bits, flipped one at a time, are noticed; the others must change nothing that `see` gives."""
    data = path.read_bytes()
    expected = see()
    noticed = 0
    try:
        for bit in bits:
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            message = ""
            try:
                assert see() == expected, f"bit {bit} of {path.name} gives something else"
            except CacheError as error:
                message = str(error)
            assert not message or str(path.parent) in message
            noticed += bool(message)
    finally:
        path.write_bytes(data)
    return noticed


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("count", [40, pytest.param(10**9, marks=pytest.mark.slow)])
def test_a_flipped_bit_gives_the_same_or_an_error(cache: Path, name: str, count: int) -> None:
    path = folder_of(cache) / name
    num_bits = 8 * path.stat().st_size
    bits = np.random.default_rng(3).permutation(num_bits)[:count].tolist()
    assert flipped(path, bits, lambda: everything(cache)) > 0


def test_every_bit_of_a_row_counts(cache: Path) -> None:
    path = folder_of(cache) / "blocks.arrow"
    table = MappedTable(path, BLOCK_COLUMNS)
    begins = map(table.find_begin, BLOCK_COLUMNS.names or ())
    bits = [8 * begin + bit for begin in begins for bit in range(8)]
    assert flipped(path, bits, lambda: everything(cache)) == len(bits)


def test_rows_of_a_large_table_are_verified_too(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = everything(cache)
    monkeypatch.setattr(MappedTable, "mapped_bytes", 0)
    assert everything(cache) == expected
    path = folder_of(cache) / "blocks.arrow"
    begin = MappedTable(path, BLOCK_COLUMNS).find_begin("tokens_before")
    assert flipped(path, [8 * (begin + 8), 8 * (begin + 17)], lambda: everything(cache)) == 2


def test_a_row_is_named_with_its_file(cache: Path) -> None:
    path = folder_of(cache) / "blocks.arrow"
    data = bytearray(path.read_bytes())
    data[MappedTable(path, BLOCK_COLUMNS).find_begin("offset") + 8] ^= 1
    path.write_bytes(data)
    store = BlockStore(open_snapshot(cache, path.parent.name), storage=STORAGE)
    message = rf"{path}: damaged table: row 1 does not match its checksum in blocks.check.arrow; build again to repair it"
    with pytest.raises(CacheError, match=message):
        store.read([1])
    store.read([0])


def test_an_index_of_an_older_version_is_read_with_a_warning_and_completed(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = everything(cache)
    folder = folder_of(cache)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    strip_checks(folder)
    with caplog.at_level(logging.WARNING, "megablend"):
        assert everything(cache) == expected
        assert everything(cache) == expected
    assert (
        len([record for record in caplog.records if "without checksums of rows" in record.message])
        == 1
    )
    assert verify(str(cache), data=True, storage=STORAGE) == []
    under_way = open_snapshot(cache, folder.name)
    report = build(cache, spec(tmp_path / "data"))
    assert not report.created
    for name in (*TABLES, "files.arrow", "manifest.json"):
        assert (folder / name).read_bytes() == files[name], name
    assert BlockStore(under_way, (1000,), storage=STORAGE).read_blocks([0]).tokens.tolist()
    assert everything(cache) == expected
    assert verify(str(cache), data=True, storage=STORAGE) == []


def test_an_index_that_is_damaged_gets_no_checksums(cache: Path) -> None:
    folder = folder_of(cache)
    strip_checks(folder)
    path = folder / "blocks.arrow"
    path.write_bytes(path.read_bytes()[:-100] + bytes([1]) + path.read_bytes()[-99:])
    with pytest.raises(CacheError, match=r"blocks.arrow: damaged table"):
        checked.complete_checks(folder)
    assert not [path for path in folder.iterdir() if "check" in path.name]


def test_damage_to_the_checksums_is_found_and_mended(cache: Path, tmp_path: Path) -> None:
    path = folder_of(cache) / "blocks.check.arrow"
    data = path.read_bytes()
    path.write_bytes(data[:-400] + bytes(8) + data[-392:])
    assert [
        problem
        for problem in verify(str(cache), data=False, storage=STORAGE)
        if str(path) in problem
    ]
    build(cache, spec(tmp_path / "data"))
    assert path.read_bytes() == data
    assert everything(cache)
