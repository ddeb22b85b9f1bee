"""What nothing needs goes, what a run or a job may need stays, whenever the collection is killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from megablend.distributed.base import SingleProcess
from megablend.errors import CacheError
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.build_document_tables import build_tables
from megablend.index.read.document_table import PartDocuments, open_table
from megablend.index.read.snapshot import open_snapshot
from megablend.index.tables.cache_folders import fragments, snapshots, splits
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.index.tables.ranged_blocks import store_totals
from megablend.index.verify.gc import Collected, collect
from megablend.index.verify.verify import verify
from megablend.system import build_lock as lock
from megablend.system.build_lock import build_lock
from tests.forks import forked
from tests.index.index_data import build, environment, spec, write
from tests.storages import STORAGE

DAY = 86400.0
CRASH = """
import os, shutil, signal, sys
from pathlib import Path
from megablend.index.read.document_table import PartDocuments, open_table
from megablend.index.verify.gc import collect

calls = []

def crashing(function, step):
    def call(*args, **options):
        calls.append(args)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return call

def work(step, cache):
    step = int(step)
    for name in ("rename", "unlink"):
        setattr(Path, name, crashing(getattr(Path, name), step))
    os.unlink, os.rmdir = crashing(os.unlink, step), crashing(os.rmdir, step)
    shutil._use_fd_functions = False
    collect(cache, lambda: [], min_age_seconds=0, dry_run=False)
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Three snapshots: of a and b, of b and c, of c and d."""
    for seed, name in enumerate("abcd"):
        write(tmp_path / "data" / f"{name}.arrow", seed)
    for pattern in ("[ab]", "[bc]", "[cd]"):
        digest = build(tmp_path / "cache", spec(tmp_path / "data", f"{pattern}.arrow")).digest
        store_totals(tmp_path / "cache", digest, ["x"]).keep(np.arange(3))
    return tmp_path / "cache"


def age(folder: Path, days: float) -> None:
    """Make all within `folder` older."""
    for path in [folder, *folder.rglob("*")]:
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))


def gc(cache: Path, *needed: str, days: float = 7.0, dry_run: bool = False) -> Collected:
    return collect(cache, lambda: needed, min_age_seconds=days * DAY, dry_run=dry_run)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_nothing_needs_goes(cache: Path) -> None:
    first, second, third = list_snapshots(cache)
    age(cache, 8)
    before = {path: path.read_bytes() for path in snapshots(cache).joinpath(third).iterdir()}
    seen = gc(cache, dry_run=True)
    assert (names(snapshots(cache)), len(names(fragments(cache)))) == ({first, second, third}, 4)
    found = gc(cache)
    assert found == seen
    assert (found.snapshots, found.kept, found.others) == ((first, second), (third,), 4)
    assert found.bytes > 1000
    assert names(snapshots(cache)) == {third}
    assert {
        path: path.read_bytes() for path in snapshots(cache).joinpath(third).iterdir()
    } == before
    assert store_totals(cache, third, ["x"]).find(np.dtype(np.int64), 3) is not None
    assert verify(str(cache), data=True, storage=STORAGE) == []
    assert gc(cache) == Collected(snapshots=(), kept=(third,), others=0, bytes=0)
    report = build(cache, spec(cache.parent / "data", "[cd].arrow"))
    assert (report.read, report.digest) == (0, third)
    assert build(cache, spec(cache.parent / "data", "[bc].arrow")).read == 1


def test_what_a_run_stands_on_stays(cache: Path) -> None:
    first, second, third = list_snapshots(cache)
    age(cache, 8)
    found = gc(cache, first)
    assert (found.snapshots, found.kept, found.others) == ((second,), (first, third), 1)
    assert open_snapshot(cache, first).num_files == 2


def test_what_was_in_use_lately_stays(cache: Path) -> None:
    first, second, third = list_snapshots(cache)
    assert gc(cache).snapshots == ()
    age(snapshots(cache) / first, 8)  # but the second took over only now
    assert gc(cache).snapshots == ()
    age(snapshots(cache) / second, 8)
    found = gc(cache)
    # What was found in its files may be of use to a build that was killed.
    assert (found.snapshots, found.others) == ((first,), 0)
    age(fragments(cache), 8)
    age(splits(cache), 8)
    found = gc(cache)
    assert (found.snapshots, found.others) == ((), 2)
    assert list_snapshots(cache) == [second, third]


def test_building_the_newest_again_and_again_keeps_no_other_alive(cache: Path) -> None:
    first, second, _ = list_snapshots(cache)
    age(cache, 8)
    build(cache, spec(cache.parent / "data", "[cd].arrow"))
    assert gc(cache).snapshots == (first, second)


def test_a_snapshot_that_was_built_again_is_as_young_as_that(cache: Path) -> None:
    first, second, third = list_snapshots(cache)
    age(cache, 8)
    build(cache, spec(cache.parent / "data", "[ab].arrow"))
    build(cache, spec(cache.parent / "data", "[cd].arrow"))
    assert list_snapshots(cache) == [second, first, third]
    assert gc(cache).snapshots == (second,)
    assert gc(cache, days=0).snapshots == (first,)


def test_tables_of_documents_go_with_the_files(cache: Path) -> None:
    for digest in list_snapshots(cache):
        build_tables(
            BlockStore(open_snapshot(cache, digest), storage=STORAGE), [0], launch=SingleProcess()
        )
        blocks = PartDocuments(
            open_table(open_snapshot(cache, digest), 0), [range(3)], has_eod=False
        )
        blocks.keep_group_totals(2, 1)
    first, _, third = list_snapshots(cache)
    age(cache, 8)
    assert [len(names(cache / name)) for name in ("documents", "lengths", "splits")] == [3, 4, 6]
    assert gc(cache, *list_snapshots(cache)).others == 0
    gc(cache, first)
    assert [len(names(cache / name)) for name in ("documents", "lengths", "splits")] == [2, 4, 4]
    gc(cache)
    assert [len(names(cache / name)) for name in ("documents", "lengths", "splits")] == [1, 2, 2]
    assert (
        build_tables(
            BlockStore(open_snapshot(cache, third), storage=STORAGE), [0], launch=SingleProcess()
        ).counted
        == 0
    )


def test_parts_and_damaged_fragments_go_when_they_are_old(cache: Path) -> None:
    one = next(iter(fragments(cache).iterdir()))
    part = one.with_name(f"{one.name}.part-0-3")
    damaged = one.with_name("ab-cd")
    shutil.copy(one, part)
    damaged.write_bytes(b"megablend fragment\n\xff\xff")
    assert gc(cache).others == 0
    age(fragments(cache), 8)
    assert gc(cache, *list_snapshots(cache)).others == 2
    assert not part.exists()
    assert not damaged.exists()


def test_it_refuses_at_once_while_a_build_runs(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    age(cache, 8)
    monkeypatch.setattr("megablend.system.build_lock.WAIT_SECONDS", 1e9)
    with (
        build_lock(cache),
        pytest.raises(
            CacheError, match=r"another build holds the cache \(host .*wait for that build"
        ),
    ):
        gc(cache)
    assert len(list_snapshots(cache)) == 3


def test_it_refuses_what_it_cannot_know(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CacheError, match="there is no cache here"):
        gc(tmp_path / "nowhere")
    age(cache, 8)

    def needed() -> Collection[str]:
        raise CacheError("the ledger is damaged")

    with pytest.raises(CacheError, match="the ledger is damaged"):
        collect(cache, needed, min_age_seconds=0, dry_run=False)
    with monkeypatch.context() as patch:
        patch.setattr(lock, "_try_lock", lambda file: 38)
        with pytest.raises(CacheError, match="has no locks, so a running build cannot be detected"):
            gc(cache)
    newest = snapshots(cache) / list_snapshots(cache)[-1] / "files.arrow"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(CacheError, match="build again to repair it"):
        gc(cache)
    assert len(list_snapshots(cache)) == 3


@pytest.mark.long
def test_a_collection_killed_at_each_of_its_steps(cache: Path) -> None:
    age(cache, 8)
    third = list_snapshots(cache)[-1]
    with forked(CRASH, environment()) as call:
        for step in range(1, 60):
            copy = cache.with_name(f"copy{step}")
            shutil.copytree(cache, copy)
            code = call(step, copy)
            assert verify(str(copy), data=True, storage=STORAGE) == []
            assert list_snapshots(copy)[-1] == third
            for digest in list_snapshots(copy):
                assert open_snapshot(copy, digest).num_files == 2
            if code == 0:
                break
            assert code == -signal.SIGKILL
            gc(copy, days=0)
            assert names(snapshots(copy)) == {third}
            assert len(names(fragments(copy))) == 2
            assert len(names(splits(copy))) == 1
        else:
            pytest.fail("the collection never finished")
    assert step > 12
