"""Copies that a node has of caches in object stores are removed once they are unused for long."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import megablend
from megablend.caches.objects.copies import RECEIPTS, UNUSED_SECONDS, note_use, remove_unused
from megablend.caches.objects.node import lock_node
from tests.caches.test_remote_cache import configs, samples

LONG_AGO = time.time() - UNUSED_SECONDS - 1000


def make_older(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (LONG_AGO, LONG_AGO))


def find_nodes(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "node").glob(f"*/{RECEIPTS}"))


def test_the_next_download_removes_what_was_not_used_for_long(tmp_path: Path, remote: str) -> None:
    _, config = configs(tmp_path, remote)
    megablend.build(config)
    expected = samples(config)
    (old,) = find_nodes(tmp_path)
    make_older(old)
    another = config | {"cache": f"{remote}-b"}
    megablend.build(another)
    (new,) = find_nodes(tmp_path)
    assert new != old
    assert not old.exists()
    assert samples(config) == expected  # downloaded again
    assert set(find_nodes(tmp_path)) == {old, new}


def test_what_is_used_stays_and_what_is_downloaded_just_now(tmp_path: Path, remote: str) -> None:
    _, config = configs(tmp_path, remote)
    digest = megablend.build(config).index.digest
    (node,) = find_nodes(tmp_path)
    copy = node / "generations" / digest
    receipt = node / RECEIPTS / f"generations-{digest}.json"
    make_older(node)
    megablend.open(config)  # uses it
    assert remove_unused(node, time.time() - 100)[0] == 0
    make_older(node)
    with lock_node(node, f"generations-{digest}"):
        assert remove_unused(node, time.time() - 100)[0] == 0
    assert remove_unused(node, time.time() - 100, dry_run=True)[0] == 1
    assert copy.is_dir()
    assert remove_unused(node, time.time() - 100)[1] > 0
    assert not copy.exists()
    assert not receipt.exists()


@pytest.mark.parametrize("dry_run", [True, False])
def test_gc_removes_those_of_its_node(tmp_path: Path, remote: str, dry_run: bool) -> None:
    _, config = configs(tmp_path, remote)
    digest = megablend.build(config).index.digest
    (node,) = find_nodes(tmp_path)
    other = node.parent / ("0" * 24)
    (other / RECEIPTS).mkdir(parents=True)
    (other / "generations/abc").mkdir(parents=True)
    (other / "generations/abc/x").write_bytes(b"123")
    (other / RECEIPTS / "generations-abc.json").write_text("{}")
    make_older(other)
    megablend.gc(config, older_than_days=1, dry_run=dry_run)
    assert other.exists() == dry_run
    assert (node / "generations" / digest).is_dir()


def make_copy(folder: Path) -> Path:
    """A copy of a folder that was used long ago. Returns: its receipt."""
    receipt = folder / RECEIPTS / "generations-abc.json"
    for path in (receipt, folder / "generations" / "abc" / "x"):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    make_older(folder)
    return receipt


def test_the_folder_of_the_cache_itself_stays(tmp_path: Path) -> None:
    own = tmp_path / ("0" * 24)
    other = tmp_path / ("1" * 24)
    for folder in (own, other):
        make_copy(folder)
    assert remove_unused(own, time.time() - 100)[0] == 2
    assert own.is_dir()
    assert not (own / "generations" / "abc").exists()
    assert not other.exists()


def test_what_is_used_while_it_is_looked_at_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = make_copy(tmp_path / ("0" * 24))

    @contextlib.contextmanager
    def use_and_lock(*_: object) -> Iterator[bool]:
        assert note_use(receipt)
        yield True

    monkeypatch.setattr("megablend.caches.objects.copies.try_lock_node", use_and_lock)
    assert remove_unused(tmp_path / ("0" * 24), time.time() - 100)[0] == 0
    assert receipt.exists()
    assert (tmp_path / ("0" * 24) / "generations" / "abc" / "x").exists()
