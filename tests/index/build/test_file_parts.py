"""Large files are indexed in parts, by several ranks: the index is the one that is made of the whole file at once."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.config.read_spec import ReadSpec
from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import SingleProcess
from megablend.errors import ChangedFileError
from megablend.formats.base import FileIndex
from megablend.formats.parquet import PARQUET
from megablend.index.build import file_parts as parts
from megablend.index.build.build import Progress, build_index
from megablend.index.build.file_parts import join, num_parts, part_span
from megablend.index.build.file_tasks import items_of, plan_work
from megablend.index.build.source_spec import list_columns
from megablend.index.build.sources import list_source
from megablend.index.verify.verify import verify
from megablend.storage.base import Storage
from megablend.storage.local import LocalStorage
from tests.index.index_data import (
    ROOT,
    build,
    driver,
    environment,
    run,
    snapshot_bytes,
    spec,
    wait_for_end,
)
from tests.storages import STORAGE

GOLDEN = Path(__file__).parents[2] / "golden"
COLUMNS = json.loads((GOLDEN / "expected.json").read_text())["files"]
GROUPS = 40


def write_groups(path: Path, *, seed: int = 0, page_index: bool = True) -> Path:
    """A file of GROUPS row groups: some with empty rows, one with null elements, one without rows."""
    rng = np.random.default_rng(seed)
    kind = pa.list_(pa.int32())
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"data_page_size": 100, "write_batch_size": 5, "use_dictionary": False}
    with pq.ParquetWriter(
        path, pa.schema([("tokens", kind)]), write_page_index=page_index, **options
    ) as writer:
        for group in range(GROUPS):
            rows = [
                rng.integers(0, 99, rng.integers(0, 12) * (group % 4 > 0)).tolist()
                for _ in range(30)
            ]
            if group == 7:
                rows[3:5] = [[None, 1], [None]]
            writer.write_table(pa.table({"tokens": pa.array(rows if group != 9 else [], kind)}))
    return path


def same(one: FileIndex, other: FileIndex) -> bool:
    tables = (one.chunks.tobytes(), one.blocks.tobytes()) == (
        other.chunks.tobytes(),
        other.blocks.tobytes(),
    )
    facts = ("rows", "tokens", "token_dtype", "structure", "meta", "scanned_bytes")
    return tables and all(getattr(one, fact) == getattr(other, fact) for fact in facts)


def check_joined(path: Path, column: str | None, *, documents: bool) -> None:
    storage = LocalStorage()
    size = path.stat().st_size
    read = ReadSpec(column=column, count_documents=documents)
    whole = PARQUET.index(str(path), read, storage=storage)
    for count in (1, 2, 3, 17):
        spans = [part_span(size, part, count) for part in range(count)]
        found = [PARQUET.index_part(str(path), read, span=span, storage=storage) for span in spans]
        assert same(join(found), whole)


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("page_index", [True, False])
def test_parts_join_to_the_whole(tmp_path: Path, documents: bool, page_index: bool) -> None:
    check_joined(
        write_groups(tmp_path / "x.parquet", page_index=page_index), None, documents=documents
    )


@pytest.mark.parametrize("name", [name for name in COLUMNS if name.endswith(".parquet")])
def test_parts_of_what_writers_write(name: str) -> None:
    check_joined(GOLDEN / name, COLUMNS[name]["column"], documents=True)


def test_the_number_of_parts_follows_from_the_size_alone() -> None:
    assert [num_parts(size) for size in (0, 1, parts.PART_BYTES, 2 * parts.PART_BYTES - 1)] == [
        1,
        1,
        1,
        1,
    ]
    assert num_parts(2 * parts.PART_BYTES) == 2
    assert num_parts(1 << 60) == parts.MAX_PARTS
    for size, count in ((10, 3), (11, 4), (1 << 50, 256)):
        spans = [part_span(size, part, count) for part in range(count)]
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == size


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2500)


def test_ranks_share_one_file(tmp_path: Path, small_parts: None) -> None:
    write_groups(tmp_path / "x.parquet")
    work = plan_work(list_columns([list_source(spec(tmp_path, "*.parquet"), storage=STORAGE)]), [])
    items = items_of(work)
    assert len(items) == work[0].num_parts == work[0].file.size // 2500 > 8
    assert sum(item.size for item in items) == work[0].file.size
    assert all(len(mine) >= 2 for mine in assign_longest_first([item.cost for item in items], 4))


def test_progress_moves_while_one_file_is_indexed(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megablend.index.build.share_work._POST_SECONDS", 0)
    write_groups(tmp_path / "x.parquet")
    seen: list[Progress] = []
    cache = str(tmp_path / "cache")
    report = build_index(
        cache,
        [spec(tmp_path, "*.parquet")],
        launch=SingleProcess(),
        progress=seen.append,
        storage=STORAGE,
    )
    assert (report.read, report.reused, report.num_files) == (1, 0, 1)
    assert len(seen) > 8
    assert all(one.bytes < other.bytes for one, other in itertools.pairwise(seen))
    assert [each.files for each in seen] == [0] * (len(seen) - 1) + [1]
    assert seen[-1].bytes == seen[-1].num_bytes


def test_what_a_build_that_failed_left_serves_the_next(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_groups(tmp_path / "x.parquet")
    source = spec(tmp_path, "*.parquet")
    cache = tmp_path / "cache"
    asked: list[int] = []
    real = type(PARQUET).index_part

    def index_part(
        self: object, path: str, read: ReadSpec, *, span: tuple[int, int], storage: Storage
    ) -> FileIndex:
        asked.append(span[0])
        if len(asked) == 5:
            raise KeyboardInterrupt
        return real(PARQUET, path, read, span=span, storage=storage)

    monkeypatch.setattr(type(PARQUET), "index_part", index_part)
    with pytest.raises(KeyboardInterrupt):
        build(cache, source)
    assert verify(str(cache), data=True, storage=STORAGE) == []
    damaged = sorted((cache / "fragments").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-3])
    first = list(asked)
    report = build(cache, source)
    again = set(asked[5:]) & set(first[:4])
    assert len(again) == 1
    assert len(set(asked)) == len(asked) - 2  # but for the damaged one, and the one that failed
    assert "damaged fragment" in report.notes[0]
    assert (report.read, report.reused, report.changed) == (1, 0, ())
    assert len(list((cache / "fragments").iterdir())) == 1
    assert verify(str(cache), data=True, storage=STORAGE) == []
    assert build(cache, source).reused == 1
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 40)
    assert build(tmp_path / "whole", source).digest == report.digest


def test_parts_of_two_versions_of_a_file_are_never_joined(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_groups(tmp_path / "x.parquet")
    source = spec(tmp_path, "*.parquet")
    cache = tmp_path / "cache"
    seen: list[str] = []

    def sampled_content_digest(path: str, size: int, storage: object) -> str:
        seen.append(path)
        return "ab" if len(seen) == 3 else "cd"

    monkeypatch.setattr(
        "megablend.index.build.file_tasks.sampled_content_digest", sampled_content_digest
    )
    with pytest.raises(ChangedFileError, match="changed while it was being indexed, or is not"):
        build(cache, source)
    monkeypatch.undo()
    assert not list((cache / "fragments").iterdir())
    assert build(cache, source).read == 1
    assert path.exists()


@pytest.mark.long
def test_any_number_of_ranks_makes_the_same_bytes_of_one_file(tmp_path: Path) -> None:
    write_groups(tmp_path / "data" / "x.parquet")
    made = []
    for num_ranks, part_bytes in ((0, 1 << 40), (1, 4000), (3, 4000), (4, 2500)):
        cache = tmp_path / f"cache{num_ranks}"
        seen = tmp_path / f"seen{num_ranks}"
        seen.mkdir()
        command = driver(num_ranks, cache, f"a={tmp_path}/data/*.parquet")
        result = run(
            command,
            MEGABLEND_TEST_PART_BYTES=part_bytes,
            MEGABLEND_TEST_PIDS=seen,
            MEGABLEND_TEST_SLOW=0.01,
        )
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        assert (report["read"], report["reused"], report["progress"]["files"]) == (1, 0, 1)
        assert report["progress"]["bytes"] == report["progress"]["num_bytes"]
        ranks = {path.name.rpartition("-")[2] for path in seen.glob("part-*")}
        assert len(ranks) == num_ranks
        made.append(
            {"digest": report["digest"].encode(), **snapshot_bytes(cache, report["digest"])}
        )
    assert all(each == made[0] for each in made[1:])


@pytest.mark.long
def test_a_rank_that_fails_ends_all_and_a_kill_leaves_what_was_done(tmp_path: Path) -> None:
    write_groups(tmp_path / "data" / "x.parquet")
    cache = tmp_path / "cache"
    pattern = f"a={tmp_path}/data/*.parquet"
    result = run(
        driver(3, cache, pattern), MEGABLEND_TEST_PART_BYTES=2500, MEGABLEND_TEST_FAIL="1:data"
    )
    assert result.returncode == 3
    assert "rank 1: " in result.stderr
    assert "x.parquet at byte 17: is truncated" in result.stderr
    pids = tmp_path / "pids"
    cache = tmp_path / "other cache"
    pids.mkdir()
    extra = {
        "MEGABLEND_TEST_PART_BYTES": 2500,
        "MEGABLEND_TEST_PIDS": pids,
        "MEGABLEND_TEST_HANG": 3,
    }
    with subprocess.Popen(
        driver(2, cache, pattern), env=environment(**extra), cwd=ROOT, stderr=subprocess.DEVNULL
    ) as launcher:
        deadline = time.monotonic() + 500
        while not (pids / "hangs-1").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(int((pids / "1").read_text()), signal.SIGKILL)
        assert launcher.wait(timeout=500) != 0
    wait_for_end(pids)
    left = len(list((cache / "fragments").glob("*.part-*")))
    assert left >= 3
    done = run(driver(4, cache, pattern), MEGABLEND_TEST_PART_BYTES=2500)
    assert done.returncode == 0, done.stderr
    assert len(list((cache / "fragments").iterdir())) == 1
    assert verify(str(cache), data=True, storage=STORAGE) == []
