"""Tables of documents: what they hold, made once, by any number of ranks, from what was counted before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megablend.config.read_spec import ReadSpec
from megablend.distributed.base import SingleProcess
from megablend.errors import CacheError
from megablend.formats.base import STARTS_MID_DOCUMENT
from megablend.index.blocks import build_document_tables as tabulate
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.build_document_tables import TablesReport, build_tables
from megablend.index.blocks.document_lengths import split_into_ranges
from megablend.index.build.build import SourceSpec, build_index
from megablend.index.read import document_table as documents
from megablend.index.read.document_table import PartDocuments, fetch_table, open_table
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.manifest import dump_with_checksum, read_manifest
from megablend.index.verify.verify import verify
from tests.formats.writers import KINDS
from tests.index.index_data import driver, run
from tests.storages import STORAGE


def listed(seed: int, count: int = 50) -> list[list[int] | None]:
    """Documents, some of which are longer than a page, empty or null."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 3, 20, 300], count).tolist()
    return [list(range(size)) if size or i % 2 else None for i, size in enumerate(sizes)]


def write(folder: Path, kind: str, seeds: list[int]) -> SourceSpec:
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        KINDS[kind].write(folder / f"{seed}{KINDS[kind].suffix}", listed(seed))
    pattern = str(folder / f"*{KINDS[kind].suffix}")
    return SourceSpec(
        name=kind, patterns=(pattern,), read=ReadSpec(column=KINDS[kind].column, block_bytes=256)
    )


def make(cache: Path, *specs: SourceSpec, **options: Any) -> tuple[BlockStore, TablesReport]:
    digest = build_index(str(cache), specs, launch=SingleProcess(), storage=STORAGE).digest
    store = BlockStore(open_snapshot(cache, digest), storage=STORAGE)
    return store, build_tables(store, range(len(specs)), launch=SingleProcess(), **options)


@pytest.mark.parametrize(
    "stretch_bytes", [1 << 30, 1], ids=["one stretch a file", "a stretch a block"]
)
def test_a_table_holds_every_documents_length(tmp_path: Path, stretch_bytes: int) -> None:
    specs = [write(tmp_path / kind, kind, [0, 1, 2]) for kind in KINDS]
    store, report = make(tmp_path / "cache", *specs, stretch_bytes=stretch_bytes)
    lengths = [len(document or []) for seed in range(3) for document in listed(seed)]
    assert (report.documents, report.counted) == (150 * len(KINDS), 150 * len(KINDS))
    for number in range(len(specs)):
        table = open_table(store.snapshot, number)
        assert (table.num_documents, table.num_tokens) == (150, sum(lengths))
        for eod in (False, True):
            ends = [length + (eod and length > 0) for length in lengths]
            starts = [0, *np.cumsum(ends).tolist()]
            assert table.before(np.arange(151), has_eod=eod).tolist() == starts
            assert table.lengths(np.arange(150), has_eod=eod).tolist() == ends
            part = PartDocuments(table, [range(30, 120)], has_eod=eod)
            assert (part.num_blocks, part.num_tokens) == (90, starts[120] - starts[30])
            assert part.before(np.array([0, 90, 17])).tolist() == [
                start - starts[30] for start in (starts[30], starts[120], starts[47])
            ]
    assert verify(str(tmp_path / "cache"), data=True, storage=STORAGE) == []


@pytest.mark.parametrize(("num_groups", "run"), [(7, 1), (3, 2), (1, 1)])
def test_totals_of_groups_are_kept(tmp_path: Path, num_groups: int, run: int) -> None:
    store, _ = make(tmp_path / "cache", write(tmp_path / "data", "arrow", [0, 1]))
    for eod in (False, True):
        part = PartDocuments(open_table(store.snapshot, 0), [range(5, 93)], has_eod=eod)
        lengths = np.diff(part.before(np.arange(89)))
        expected = np.bincount(np.arange(88) // run % num_groups, lengths, num_groups).tolist()
        assert part.group_totals(num_groups, run).tolist() == expected
        part.keep_group_totals(num_groups, run)
        part._count_groups = None  # type: ignore[method-assign, assignment]
        assert part.group_totals(num_groups, run).tolist() == expected
        part.keep_group_totals(num_groups, run)


def test_what_the_idx_tells_costs_nothing_and_parquet_its_pages(tmp_path: Path) -> None:
    store, report = make(tmp_path / "cache", write(tmp_path / "pair", "megatron", [0, 1]))
    assert report.scanned_bytes == 0
    store, report = make(tmp_path / "cache", write(tmp_path / "pages", "parquet", [0, 1]))
    blocks = store.snapshot.blocks(np.arange(len(store.snapshot.tokens_before) - 1))
    assert report.scanned_bytes == blocks["stored_bytes"].sum()
    assert report.table_bytes > 4 * report.documents


def test_a_second_build_counts_nothing_and_a_file_more_is_the_only_one_counted(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    first, report = make(cache, write(tmp_path / "data", "parquet", [0, 1, 3]))
    assert make(cache, write(tmp_path / "data", "parquet", []))[1].counted == 0
    second, report = make(cache, write(tmp_path / "data", "parquet", [2]))
    assert (report.documents, report.counted) == (200, 50)
    assert open_table(second.snapshot, 0).num_documents == 200
    assert open_table(first.snapshot, 0).num_documents == 150  # the older snapshot keeps its own


def test_snapshots_of_the_same_files_share_a_table(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    spec = write(tmp_path / "data", "parquet", [0, 1])
    first, _ = make(cache, spec)
    second, report = make(cache, spec, write(tmp_path / "more", "arrow", [5]))
    assert first.snapshot.digest != second.snapshot.digest
    assert fetch_table(first.snapshot, 0) == fetch_table(second.snapshot, 0)
    assert report.counted == 50


def test_a_table_is_cut_within_a_file_where_documents_begin(tmp_path: Path) -> None:
    store, _ = make(tmp_path / "cache", write(tmp_path / "data", "parquet-v2-unindexed", [0, 1]))
    parts = list(split_into_ranges(store.snapshot, 0, 700))
    assert len(parts) > 6
    assert [part.stop_block for part in parts[:-1]] == [part.first_block for part in parts[1:]]
    starts = store.snapshot.blocks(np.array([part.first_block for part in parts]))
    assert not (starts["flags"] & STARTS_MID_DOCUMENT).any()
    assert sum(part.documents for part in parts) == 100
    blocks = store.snapshot.blocks(np.arange(len(store.snapshot.tokens_before) - 1))
    assert sum(part.stored_bytes for part in parts) == blocks["stored_bytes"].sum()


def test_damaged_counts_are_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    spec = write(tmp_path / "data", "parquet", [0, 1])

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tabulate, "_commit", fail)
        with pytest.raises(KeyboardInterrupt):
            make(cache, spec)
    count = sorted((cache / "lengths").iterdir())[1]
    count.write_bytes(b"x" + count.read_bytes()[1:])
    store, report = make(cache, spec)
    assert report.counted == 50
    assert open_table(store.snapshot, 0).num_tokens == store.snapshot.sources[0].tokens


def test_a_table_that_is_missing_or_damaged_is_said_so(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    spec = write(tmp_path / "data", "parquet", [0])
    snapshot = open_snapshot(
        cache, build_index(str(cache), [spec], launch=SingleProcess(), storage=STORAGE).digest
    )
    with pytest.raises(CacheError, match="'parquet' has no document table; rebuild the index"):
        open_table(snapshot, 0)
    store, _ = make(cache, spec)
    lengths = fetch_table(snapshot, 0) / "lengths.arrow"
    whole = lengths.read_bytes()
    lengths.write_bytes(whole[:-8])
    with pytest.raises(
        CacheError,
        match=r"lengths\.arrow: has \d+ bytes, but \d+ were committed; build again to repair it",
    ):
        open_table(snapshot, 0)
    assert any(
        "lengths.arrow: damaged table" in problem
        for problem in verify(str(cache), data=False, storage=STORAGE)
    )
    lengths.write_bytes(whole)
    documents._open_once.cache_clear()
    assert open_table(store.snapshot, 0).num_tokens == store.snapshot.sources[0].tokens
    (lengths.parent / "manifest.json").unlink()
    assert any(
        "manifest.json: cannot be read" in problem
        for problem in verify(str(cache), data=False, storage=STORAGE)
    )
    assert make(cache, spec)[1].counted == 0
    assert verify(str(cache), data=True, storage=STORAGE) == []


@pytest.mark.parametrize("name", ["lengths.arrow", "starts.arrow", "manifest.json"])
@pytest.mark.parametrize("size", [0, 100, None])
def test_a_build_mends_a_damaged_table(tmp_path: Path, name: str, size: int | None) -> None:
    source = write(tmp_path / "data", "arrow", [0, 1])
    store, _ = make(tmp_path / "cache", source)
    damaged = fetch_table(store.snapshot, 0) / name
    whole = damaged.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    damaged.write_bytes(flipped if size is None else whole[:size])
    with pytest.raises(CacheError, match=rf"{name}: .*; build again to repair it"):
        documents._open_once.__wrapped__(damaged.parent, (0, 0, 0))
    assert verify(str(tmp_path / "cache"), data=False, storage=STORAGE) != []
    store, report = make(tmp_path / "cache", source)
    assert report.counted == 0
    assert damaged.read_bytes() == whole
    assert verify(str(tmp_path / "cache"), data=False, storage=STORAGE) == []


@pytest.mark.parametrize(
    ("name", "column", "row"),
    [("lengths.arrow", "tokens", 70), ("starts.arrow", "tokens", 1), ("starts.arrow", "filled", 1)],
)
def test_a_table_too_large_for_a_checksum_at_opening_is_never_read_as_other_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, column: str, row: int
) -> None:
    monkeypatch.setattr(documents, "_CHECKED_BYTES", 0)
    store, _ = make(tmp_path / "cache", write(tmp_path / "data", "arrow", [0, 1, 2]))
    path = fetch_table(store.snapshot, 0) / name
    with pa.OSFile(str(path)) as file:
        buffer = pa.ipc.open_file(file).get_batch(0).column(column).buffers()[1]
    whole = path.read_bytes()
    place = whole.index(buffer.to_pybytes()) + row * (4 if name == "lengths.arrow" else 8)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
    table = open_table(store.snapshot, 0)
    with pytest.raises(
        CacheError,
        match=rf"{path.parent}: damaged table of documents \((lengths and|documents from 64)",
    ):
        PartDocuments(table, [range(150)], has_eod=True).before(np.array([3, 80]))
    if name == "lengths.arrow":
        with pytest.raises(
            CacheError,
            match=r"\(documents from 64 on do not match their checksum in groups.check.arrow",
        ):
            PartDocuments(table, [range(150)], has_eod=True).group_totals(7, 1)


RANKS = """
import json, sys
from pathlib import Path
from typing import Any
import megablend.index.blocks.build_document_tables as tabulate
from megablend.index.read.snapshot import open_snapshot
from megablend.distributed.launch import detect
from megablend.index.blocks.block_store import BlockStore
from tests.storages import STORAGE
launch = detect()
store = BlockStore(open_snapshot(sys.argv[1], sys.argv[2]), storage=STORAGE)
report = tabulate.build_tables(store, [0], launch=launch, stretch_bytes=1000)
reports = launch.gather(report)
if launch.rank == 0:
    assert reports == [report] * launch.size
    print(json.dumps([report.documents, report.counted]))
"""


@pytest.mark.long
def test_any_number_of_ranks_makes_the_same_table(tmp_path: Path) -> None:
    spec = write(tmp_path / "data", "parquet", [0, 1, 2])
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    made = []
    for num_ranks in (0, 2, 3):
        cache = tmp_path / f"cache{num_ranks}"
        digest = build_index(str(cache), [spec], launch=SingleProcess(), storage=STORAGE).digest
        command = driver(num_ranks, cache, digest)
        command[
            command.index(next(word for word in command if word.endswith("build_driver.py")))
        ] = str(script)
        result = run(command)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == [150, 150]
        folder = fetch_table(open_snapshot(cache, digest), 0)
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1] == made[2]


def test_lengths_that_change_places_within_a_large_table_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sums over them stay the same, so that only a checksum tells."""
    spec = write(tmp_path / "data", "arrow", [0, 1, 2])
    store, _ = make(tmp_path / "cache", spec)
    folder = fetch_table(store.snapshot, 0)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    table = open_table(store.snapshot, 0)
    lengths = table.lengths(np.arange(150), has_eod=False)
    first = int(np.flatnonzero(np.diff(lengths[64:128]))[0]) + 64
    monkeypatch.setattr(documents, "_CHECKED_BYTES", 0)
    documents._open_once.cache_clear()
    large = open_table(store.snapshot, 0)
    np.testing.assert_array_equal(large.lengths(np.arange(150), has_eod=False), lengths)
    np.testing.assert_array_equal(
        large.before(np.arange(151), has_eod=True), table.before(np.arange(151), has_eod=True)
    )
    data = bytearray(whole["lengths.arrow"])
    begin = data.index(lengths.astype("<i4").tobytes()) + 4 * first
    data[begin : begin + 8] = data[begin + 4 : begin + 8] + data[begin : begin + 4]
    (folder / "lengths.arrow").write_bytes(data)
    documents._open_once.cache_clear()
    damaged = open_table(store.snapshot, 0)
    for look in (damaged.lengths, damaged.before):
        with pytest.raises(
            CacheError,
            match=rf"{folder}: damaged table of documents \(documents from 64 on do not match",
        ):
            look(np.array([first]), has_eod=False)
    assert (
        damaged.lengths(np.array([first - 64, 140]), has_eod=False).tolist()
        == lengths[[first - 64, 140]].tolist()
    )
    # A table of an older version has no checksums: that is said, and the next build completes it.
    (folder / "lengths.arrow").write_bytes(whole["lengths.arrow"])
    (folder / "groups.check.arrow").unlink()
    manifest = read_manifest(folder)
    del manifest["tables"]["groups.check.arrow"]
    (folder / "manifest.json").write_bytes(dump_with_checksum(manifest))
    documents._open_once.cache_clear()
    with caplog.at_level("WARNING", "megablend"):
        open_table(store.snapshot, 0)
    assert "without checksums of rows" in caplog.text
    build_tables(store, [0], launch=SingleProcess())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    documents._open_once.cache_clear()
