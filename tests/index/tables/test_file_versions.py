"""A file that is not the one that was indexed is an error when it is opened, whatever its size and footer say."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.errors import CacheError, ChangedFileError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.file_versions import warn_moved
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.index.verify.verify import verify
from tests.index.index_data import build, spec, strip_checks, write
from tests.storages import STORAGE


def write_arrow(path: Path, tokens: np.ndarray) -> Path:
    table = pa.table({"tokens": pa.ListArray.from_arrays([0, 50, 100], pa.array(tokens))})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def write_parquet(path: Path, tokens: np.ndarray) -> Path:
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"tokens": pa.array(tokens)}), path, **options)
    return path


def write_pair(path: Path, tokens: np.ndarray) -> Path:
    path.write_bytes(tokens.astype("<i4").tobytes())
    head = (
        b"MMIDIDX\0\0"
        + (1).to_bytes(8, "little")
        + b"\4"
        + (1).to_bytes(8, "little")
        + (2).to_bytes(8, "little")
    )
    tail = np.array([len(tokens)], "<i4").tobytes() + np.array([0, 0, 1], "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + tail)
    return path


WRITERS: dict[str, Callable[[Path, np.ndarray], Path]] = {
    "arrow": write_arrow,
    "parquet": write_parquet,
    "bin": write_pair,
}
TOKENS = np.arange(100, dtype=np.int32)
OTHERS = np.arange(1000, 1100, dtype=np.int32)


def store_of(cache: Path) -> BlockStore:
    return BlockStore(open_snapshot(cache, list_snapshots(cache)[-1]), storage=STORAGE)


def tokens_of(cache: Path) -> list[int]:
    store = store_of(cache)
    found: list[int] = store.read_blocks(np.arange(store.snapshot.num_blocks)).tokens.tolist()
    return found


@pytest.fixture(params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    path = WRITERS[request.param](tmp_path / "data" / f"a.{request.param}", TOKENS)
    build(tmp_path / "cache", spec(tmp_path / "data", f"*.{request.param}"))
    return path


def replaced(path: Path) -> None:
    """Another file of the same size and description is moved to the path."""
    other = WRITERS[path.suffix[1:]](path.with_name(f"other{path.suffix}"), OTHERS)
    assert other.stat().st_size == path.stat().st_size
    other.replace(path)


def test_a_replaced_file_is_refused(path: Path, tmp_path: Path) -> None:
    assert tokens_of(tmp_path / "cache") == TOKENS.tolist()
    replaced(path)
    with pytest.raises(
        ChangedFileError,
        match=rf"{path}: changed since it was indexed \(its size is the same, but",
    ):
        tokens_of(tmp_path / "cache")


def test_a_file_rewritten_in_place_with_its_old_time_is_refused(path: Path, tmp_path: Path) -> None:
    state = path.stat()
    content = WRITERS[path.suffix[1:]](path.with_name(f"other{path.suffix}"), OTHERS).read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(ChangedFileError, match="changed since it was indexed"):
        tokens_of(tmp_path / "cache")


def test_a_replaced_file_is_refused_by_an_index_of_an_older_version(
    path: Path, tmp_path: Path
) -> None:
    store = store_of(tmp_path / "cache")
    strip_checks(store.snapshot.folder)
    assert tokens_of(tmp_path / "cache") == TOKENS.tolist()
    replaced(path)
    with pytest.raises(ChangedFileError, match="changed since it was indexed"):
        tokens_of(tmp_path / "cache")


def test_a_file_that_was_touched_or_copied_is_read_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    for seed in range(3):
        write(data / f"{seed}.arrow", seed)
    build(tmp_path / "cache", spec(data))
    expected = tokens_of(tmp_path / "cache")
    for path in data.iterdir():
        os.utime(path, ns=(1, 1))
    with caplog.at_level(logging.WARNING, "megablend"):
        assert tokens_of(tmp_path / "cache") == expected
        shutil.copytree(data, tmp_path / "copy")
        store = store_of(tmp_path / "cache")
        moved = BlockStore(
            store.snapshot, roots={"source": str(tmp_path / "copy")}, storage=STORAGE
        )
        assert moved.read_blocks(np.arange(store.snapshot.num_blocks)).tokens.tolist() == expected
    (record,) = caplog.records
    says = "64 KiB of it were compared and are unchanged; nothing more is compared, since the index has no checksums of blocks"
    assert says in record.getMessage()


def test_what_the_build_saw_is_kept_beside_the_digest_and_renewed(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    before = store_of(cache).snapshot
    seen = before.seen.tolist()
    os.utime(path, ns=(1, 1))
    assert not build(cache, spec(tmp_path / "data", f"*{path.suffix}")).created
    after = store_of(cache).snapshot
    assert after.digest == before.digest
    assert after.seen.tolist() != seen
    with caplog.at_level(logging.WARNING, "megablend"):
        assert tokens_of(cache) == TOKENS.tolist()
    assert not caplog.records


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A cache of one file."""
    write(tmp_path / "data" / "a.arrow", 1)
    build(tmp_path / "cache", spec(tmp_path / "data"))
    return tmp_path / "cache"


def test_a_flipped_bit_of_what_was_seen_is_said(small: Path) -> None:
    seen = store_of(small).snapshot.folder / "seen"
    data = seen.read_bytes()
    expected = tokens_of(small)
    for at in range(0, len(data), 5):
        seen.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(
            CacheError,
            match=rf"{seen}: damaged \(its checksum is wrong\); build again to repair it",
        ):
            tokens_of(small)
    (problem,) = verify(str(small), data=False, storage=STORAGE)
    assert (
        problem
        == f"{seen}: damaged (its checksum is wrong); build again to repair it (`megablend build CONFIG`)"
    )
    build(small, spec(small.parent / "data"))
    assert tokens_of(small) == expected


def test_a_flipped_bit_of_the_roots_is_said(small: Path) -> None:
    roots = store_of(small).snapshot.folder / "roots.json"
    data = roots.read_bytes()
    for at in range(0, len(data), 7):
        if not data[at : at + 1].isspace():
            roots.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(CacheError, match=str(roots)):
                open_snapshot(small, roots.parent.name)


def test_a_build_completes_older_indexes_that_runs_may_stand_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    cache = tmp_path / "cache"
    write(data / "a.arrow", 1)
    build(cache, spec(data))
    older = store_of(cache).snapshot
    files = {path.name: path.read_bytes() for path in older.folder.iterdir()}
    strip_checks(older.folder)
    write(data / "b.arrow", 2)
    assert build(cache, spec(data)).notes == ()
    for name in ("manifest.json", "seen", "blocks.check.arrow", "chunks.check.arrow"):
        assert (older.folder / name).read_bytes() == files[name], name


def test_a_damaged_older_index_is_a_note_of_the_build(tmp_path: Path) -> None:
    data = tmp_path / "data"
    cache = tmp_path / "cache"
    write(data / "a.arrow", 1)
    build(cache, spec(data))
    older = store_of(cache).snapshot.folder
    strip_checks(older)
    (older / "blocks.arrow").write_bytes(b"nothing")
    write(data / "b.arrow", 2)
    (note,) = build(cache, spec(data)).notes
    assert note.startswith(f"{older}/blocks.arrow: damaged table")


def test_a_bin_that_is_longer_than_its_idx_says_is_a_note_of_the_build(tmp_path: Path) -> None:
    path = write_pair(tmp_path / "a.bin", TOKENS)
    with open(path, "ab") as file:
        file.write(bytes(8))
    for _ in range(2):  # also where nothing is read again
        (note,) = build(tmp_path / "cache", spec(tmp_path, "a.bin")).notes
        assert note == (
            f"{path}: has 408 bytes, of which {tmp_path}/a.idx describes the first 400; the rest is never read; check that the "
            "two files belong together"
        )
    assert tokens_of(tmp_path / "cache") == TOKENS.tolist()


def test_forked_processes_say_only_once_that_files_were_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    child = os.fork()
    if not child:
        try:
            warn_moved(tmp_path, "a", checks_blocks=False)
        finally:
            os._exit(len(caplog.records) != 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the first one says it"
    warn_moved(tmp_path, "a", checks_blocks=False)
    assert not caplog.records
    warn_moved(tmp_path / "other", "a", checks_blocks=False)
    assert len(caplog.records) == 1
