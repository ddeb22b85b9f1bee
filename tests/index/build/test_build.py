from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from megablend.config.read_spec import ReadSpec
from megablend.errors import CacheError, ChangedFileError, ConfigError, CorruptFileError
from megablend.formats import FORMATS
from megablend.formats.base import FileIndex
from megablend.index.blocks.block_store import BlockStore
from megablend.index.build import fragments
from megablend.index.build.build import Progress
from megablend.index.build.source_spec import SourceFile, SourceSpec
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables import file_versions
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.index.verify.check_files import FileChecker
from megablend.storage import local
from megablend.storage.base import Storage
from megablend.storage.local import LocalStorage
from megablend.system import build_lock as lock
from megablend.system.build_lock import build_lock
from tests.index.index_data import build, documents_of, snapshot_bytes, spec, write
from tests.storage.changing_inodes import change_inodes

ARROW = FORMATS["arrow"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, name in enumerate("abc"):
        write(tmp_path / "data" / f"{name}.arrow", seed)
    return tmp_path / "data"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that a format was asked to index."""
    names: list[str] = []

    class Counted:
        documents_known = False
        reader_block_bytes = 0
        has_row_groups = False

        def __getattr__(self, name: str) -> object:
            return getattr(ARROW, name)

        def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
            names.append(Path(path).name)
            return ARROW.index(path, read, storage=storage)

    monkeypatch.setitem(FORMATS, "arrow", Counted())
    return names


def test_a_snapshot_holds_what_the_files_hold(data: Path, cache: Path) -> None:
    report = build(cache, spec(data))
    snapshot = open_snapshot(str(cache), report.digest)
    documents = [documents_of(seed) for seed in range(3)]
    (source,) = snapshot.sources
    assert source.tokens == sum(len(row) for rows in documents for row in rows)
    assert source.rows == sum(len(rows) for rows in documents)
    assert source.ends == sum(bool(row) for rows in documents for row in rows)
    batches = [rows[start : start + 7] for rows in documents for start in range(0, len(rows), 7)]
    kept = [batch for batch in batches if batch]
    sums = [sum(len(row) for row in batch) for batch in kept]
    np.testing.assert_array_equal(snapshot.tokens_before, [0, *itertools.accumulate(sums)])
    np.testing.assert_array_equal(np.diff(snapshot.rows_before), [len(batch) for batch in kept])
    np.testing.assert_array_equal(
        np.diff(snapshot.ends_before), [sum(map(bool, batch)) for batch in kept]
    )


def test_a_second_build_reads_nothing(data: Path, cache: Path, indexed: list[str]) -> None:
    first = build(cache, spec(data))
    assert (first.read, first.reused, first.added, first.created) == (3, 0, 3, True)
    second = build(cache, spec(data))
    assert (second.read, second.reused, second.added, second.created) == (0, 3, 0, False)
    assert second.digest == first.digest
    assert sorted(indexed) == ["a.arrow", "b.arrow", "c.arrow"]


def test_a_file_more_is_the_only_one_read(data: Path, cache: Path, indexed: list[str]) -> None:
    for i in range(100):
        write(data / "many" / f"{i}.arrow", i)
    first = build(cache, spec(data, "many/*.arrow"))
    before = snapshot_bytes(cache, first.digest)
    del indexed[:]
    write(data / "many" / "50x.arrow", 500)
    report = build(cache, spec(data, "many/*.arrow"))
    assert indexed == ["50x.arrow"]
    assert (report.read, report.reused, report.added, report.removed, report.changed) == (
        1,
        100,
        1,
        0,
        (),
    )
    assert list_snapshots(str(cache)) == [first.digest, report.digest]
    assert snapshot_bytes(cache, first.digest) == before


def test_a_replaced_file_is_read_again_and_named(
    data: Path, cache: Path, indexed: list[str]
) -> None:
    first = build(cache, spec(data))
    del indexed[:]
    write(data / "b.arrow", 77)
    report = build(cache, spec(data))
    assert (indexed, report.changed, report.read) == (["b.arrow"], ("source/b.arrow",), 1)
    assert report.digest != first.digest
    write(data / "fresh" / "b.arrow", 77)
    write(data / "fresh" / "a.arrow", 0)
    write(data / "fresh" / "c.arrow", 2)
    assert build(cache.with_name("fresh"), spec(data / "fresh")).digest == report.digest


def test_a_touched_file_is_read_again_and_makes_no_new_snapshot(
    data: Path, cache: Path, indexed: list[str]
) -> None:
    first = build(cache, spec(data))
    del indexed[:]
    os.utime(data / "c.arrow", ns=(1, 1))
    report = build(cache, spec(data))
    assert (indexed, report.changed) == (["c.arrow"], ("source/c.arrow",))
    assert (report.digest, report.created) == (first.digest, False)


def test_a_removed_file_is_counted(data: Path, cache: Path, indexed: list[str]) -> None:
    build(cache, spec(data))
    del indexed[:]
    (data / "a.arrow").unlink()
    report = build(cache, spec(data))
    assert (indexed, report.removed, report.added, report.num_files) == ([], 1, 0, 2)


def test_moved_data_is_the_same_snapshot_elsewhere(data: Path, cache: Path) -> None:
    first = build(cache, spec(data))
    moved = shutil.copytree(data, data.with_name("moved"))
    shutil.rmtree(data)
    report = build(cache, spec(moved))
    assert (report.digest, report.created) == (first.digest, False)
    snapshot = open_snapshot(str(cache), report.digest)
    assert snapshot.sources[0].root == str(moved)
    assert snapshot.path(1) == str(moved / "b.arrow")
    assert snapshot.path(1, {"source": "/elsewhere"}) == "/elsewhere/b.arrow"


def test_a_change_in_a_body_that_the_footer_does_not_tell_makes_another_snapshot(
    data: Path, cache: Path
) -> None:
    first = build(cache, spec(data))
    content = bytearray((data / "a.arrow").read_bytes())
    at = content.index(bytes(np.array(documents_of(0)[1][:2], np.int32)))
    content[at] ^= 1
    (data / "a.arrow").write_bytes(content)
    second = build(cache, spec(data))
    old, new = (
        open_snapshot(str(cache), digest).files.entry(0) for digest in (first.digest, second.digest)
    )
    assert old.opened.structure == new.opened.structure
    assert old.body != new.body
    assert first.digest != second.digest


def test_a_damaged_fragment_is_read_again_with_a_note(
    data: Path, cache: Path, indexed: list[str]
) -> None:
    first = build(cache, spec(data))
    del indexed[:]
    fragment = sorted((cache / "fragments").iterdir())[1]
    content = bytearray(fragment.read_bytes())
    content[len(content) // 2] ^= 4
    fragment.write_bytes(content)
    report = build(cache, spec(data))
    assert (len(indexed), report.read, report.changed, report.digest) == (1, 1, (), first.digest)
    assert f"{fragment}: damaged fragment" in report.notes[0]


def test_counted_documents_serve_those_who_do_not_ask_and_leave_no_trace(
    data: Path, cache: Path, indexed: list[str]
) -> None:
    build(cache, spec(data))
    del indexed[:]
    report = build(cache, spec(data, documents=False))
    assert (indexed, report.changed) == ([], ())
    snapshot = open_snapshot(str(cache), report.digest)
    assert (snapshot.sources[0].ends, set(snapshot.blocks(np.arange(3))["rows"])) == (-1, {-1})
    assert not snapshot.rows_before.any()
    fresh = build(cache.with_name("fresh"), spec(data, documents=False))
    assert fresh.digest == report.digest
    assert len(indexed) == 3


def test_a_file_may_belong_to_two_sources(data: Path, cache: Path) -> None:
    report = build(cache, spec(data, name="all"), spec(data, "a.arrow", name="one"))
    snapshot = open_snapshot(str(cache), report.digest)
    assert [list(source.files) for source in snapshot.sources] == [[0, 1, 2], [3]]
    assert snapshot.path(0) == snapshot.path(3) == str(data / "a.arrow")
    assert list(snapshot.file_of(np.arange(len(snapshot.tokens_before) - 1))[[0, -1]]) == [0, 3]


def test_two_sources_of_one_name_are_refused(data: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match="2 sources are named 'source'"):
        build(cache, spec(data), spec(data, "a.arrow"))


def test_a_file_that_changes_while_it_is_indexed_is_refused(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Meddled:
        def __getattr__(self, name: str) -> object:
            return getattr(ARROW, name)

        def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
            index = ARROW.index(path, read, storage=storage)
            os.utime(path, ns=(1, 1))
            return index

    monkeypatch.setitem(FORMATS, "arrow", Meddled())
    with pytest.raises(ChangedFileError, match=r"a\.arrow: changed while it was being indexed"):
        build(cache, spec(data, "a.arrow"))
    assert not list((cache / "fragments").iterdir())


def test_a_file_that_gets_another_inode_while_it_is_indexed_has_not_changed(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inodes = change_inodes(monkeypatch)
    build(cache, spec(data))
    assert next(inodes) > 6
    assert local.without_inodes('"16-16-16" 5:d41d8cd98f00b204e9800998ecf8427e-38') == (
        '"16-16-16" 5:d41d8cd98f00b204e9800998ecf8427e-38'
    )


def test_files_that_get_other_inodes_are_not_read_again(
    data: Path, cache: Path, indexed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does each mount of sshfs or s3fs show them, and each node."""
    change_inodes(monkeypatch)
    first = build(cache, spec(data))
    second = build(cache, spec(data))
    assert (second.read, second.changed, second.digest) == (0, (), first.digest)
    assert len(indexed) == 3
    snapshot = open_snapshot(str(cache), first.digest)
    checker = FileChecker(snapshot, {"source": str(data)}, LocalStorage())
    assert [checker.check(number) for number in range(3)] == [None] * 3
    assert checker.warnings == ()


def test_what_earlier_releases_noted_with_inodes_is_still_known(
    data: Path,
    cache: Path,
    indexed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as earlier:
        for module in (fragments, file_versions):
            earlier.setattr(module, "versions_of", lambda etag: (etag, etag))
        digest = build(cache, spec(data)).digest
    snapshot = open_snapshot(str(cache), digest)
    checker = FileChecker(snapshot, {"source": str(data)}, LocalStorage())
    assert checker.check(0) is None
    assert checker.warnings == ()
    BlockStore(snapshot, storage=LocalStorage()).read(range(snapshot.num_blocks))
    assert caplog.text == ""
    assert build(cache, spec(data)).read == 0
    assert len(indexed) == 3


def test_a_file_that_is_replaced_by_a_shorter_one_is_not_called_damaged(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a rank see it whose node has another file than the rank that listed it."""
    listed = SourceSpec.with_files

    def replace(source: SourceSpec, files: Iterable[SourceFile]) -> SourceSpec:
        source = listed(source, files)
        os.truncate(data / "c.arrow", 1000)
        return source

    monkeypatch.setattr(SourceSpec, "with_files", replace)
    with pytest.raises(ChangedFileError, match=r"c\.arrow: changed .* not the same file on all"):
        build(cache, spec(data))


def test_a_bad_file_leaves_the_fragments_of_the_others(
    data: Path, cache: Path, indexed: list[str]
) -> None:
    content = (data / "c.arrow").read_bytes()
    (data / "c.arrow").write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptFileError, match=r"c\.arrow"):
        build(cache, spec(data))
    assert list_snapshots(str(cache)) == []
    (data / "c.arrow").write_bytes(content)
    del indexed[:]
    assert build(cache, spec(data)).reused + len(indexed) == 3


def test_a_damaged_snapshot_is_made_anew(data: Path, cache: Path) -> None:
    first = build(cache, spec(data))
    blocks = cache / "generations" / first.digest / "blocks.arrow"
    whole = blocks.read_bytes()
    blocks.write_bytes(whole[:500] + b"x" + whole[501:])
    report = build(cache, spec(data))
    assert (report.digest, report.created, blocks.read_bytes()) == (first.digest, True, whole)
    (blocks.parent / "manifest.json").unlink()
    assert build(cache, spec(data)).created
    assert list_snapshots(str(cache)) == [first.digest]


def test_the_snapshot_built_last_is_the_newest(data: Path, cache: Path) -> None:
    one, two = (build(cache, spec(data, pattern)).digest for pattern in ("a.arrow", "b.arrow"))
    assert list_snapshots(str(cache)) == [one, two]
    build(cache, spec(data, "a.arrow"))
    assert list_snapshots(str(cache)) == [two, one]


def test_leftovers_of_killed_builds_go(data: Path, cache: Path) -> None:
    report = build(cache, spec(data))
    snapshots = cache / "generations"
    shutil.copytree(snapshots / report.digest, snapshots / ".tmp-generation-1-aa")
    (cache / "runs" / "skips").mkdir(parents=True)
    for name in ("fragments", "runs", "runs/skips", f"generations/{report.digest}"):
        (cache / name / ".tmp-ab-1-cd").write_bytes(b"half")
    assert list_snapshots(str(cache)) == [report.digest]
    build(cache, spec(data))
    assert [path.name for path in snapshots.iterdir()] == [report.digest]
    assert len(list((cache / "fragments").iterdir())) == 3
    assert not list(cache.rglob(".tmp-*"))


def test_a_build_waits_for_another_no_longer_than_told(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(cache, spec(data))
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.3)
    with (
        build_lock(cache),
        pytest.raises(CacheError, match=rf"held the cache .*pid {os.getpid()}, since \d{{4}}-"),
    ):
        build(cache, spec(data))
    build(cache, spec(data))


def test_a_build_that_waited_for_another_commits_the_files_of_its_time(
    data: Path, cache: Path
) -> None:
    build(cache, spec(data))
    with contextlib.ExitStack() as other:
        other.enter_context(build_lock(cache))

        def finish_the_other(progress: Progress) -> None:
            if progress.waiting_for:
                write(data / "d.arrow", 9)
                write(data / "b.arrow", 8)
                other.close()

        report = build(cache, spec(data), progress=finish_the_other)
    assert (report.num_files, report.added, report.changed) == (4, 1, ("source/b.arrow",))
    again = build(cache, spec(data))
    assert (again.digest, again.read) == (report.digest, 0)


def test_a_cache_that_is_a_file_is_refused(data: Path, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(CacheError, match=r"cache.*cannot write the cache \(Not a directory\)"):
        build(cache, spec(data))


@pytest.mark.parametrize("seed", range(3))
def test_patterns_in_any_order_are_the_same_source(data: Path, cache: Path, seed: int) -> None:
    patterns = [str(data / name) for name in ("b.arrow", "a.arrow", "?.arrow")]
    np.random.default_rng(seed).shuffle(patterns)
    source = SourceSpec(name="source", patterns=tuple(patterns), read=ReadSpec())
    assert build(cache, source).digest == build(cache, spec(data)).digest
