"""Chains of versions and folders of a cache in an object store: lost answers, rivals, damage, and what a node keeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megablend.caches.base import RUNS, OvertakenError, Record
from megablend.caches.local import LocalCacheStore
from megablend.caches.objects.commits import (
    Chain,
    Commit,
    describe_file,
    find_last,
    parse_commit,
)
from megablend.caches.objects.copies import RECEIPTS, Copies
from megablend.caches.objects.folders import Folders
from megablend.caches.objects.node import remove_old_leftovers
from megablend.caches.objects.store import PROBES, ObjectCacheStore, check_creates_once
from megablend.errors import CacheError
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import ObjectPrefix
from megablend.storage.store_options import parse_options
from tests.storage.faulty import FaultySource

FOLDER = "generations/0123456789abcdef"


@pytest.fixture
def prefix(remote: str) -> ObjectPrefix:
    return ObjectPrefix(remote, ObjectOptions())


def write(folder: Path, **files: str) -> Path:
    """A folder as a build writes it."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def commit(
    prefix: ObjectPrefix,
    node: Path,
    written: Path,
    replaced: dict[str, bytes],
    *,
    is_same: bool = False,
) -> Folders:
    folders = Folders(prefix, node)
    folders.commit(FOLDER, written, replaced, lambda *_: is_same)
    return folders


def read(prefix: ObjectPrefix, node: Path) -> dict[str, str]:
    """The files of the folder's copy on a node, as a new process finds them."""
    path = Folders(prefix, node).fetch(FOLDER, is_fresh=False)
    return {each.name: each.read_text() for each in path.iterdir()}


def test_a_version_whose_answer_was_lost_is_its_own(
    prefix: ObjectPrefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(prefix, "runs/a")
    create = ObjectPrefix.create

    def create_and_lose(self: ObjectPrefix, key: str, data: bytes) -> bool:
        assert create(self, key, data)
        return False

    monkeypatch.setattr(ObjectPrefix, "create", create_and_lose)
    assert chain.append("x", -1)
    assert chain.append(None, 0)
    assert chain.read_last() == Record(None, 1)


def test_of_rivals_one_wins_unless_both_write_the_same(prefix: ObjectPrefix) -> None:
    chain = Chain(prefix, "runs/a")
    assert chain.append({"a": 1}, -1)
    assert chain.append({"a": 1}, -1)
    assert not chain.append({"a": 2}, -1)
    assert chain.append(None, 0)
    assert not chain.append(None, 0), "each removal is one process's own"
    assert chain.read_last() == Record(None, 1)


def test_the_last_version_is_that_of_the_largest_number() -> None:
    assert (
        find_last(["a/9999.json", "a/10000.json", "a/0001.json", "a/x.json", "a/999.json"]) == 10000
    )
    assert find_last(["a/x.json"]) == -1


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", ".."])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    file = {"at": "a", "bytes": 1, "blake2b": "b", "etag": ""}
    with pytest.raises(
        CacheError,
        match=r"place: damaged \(it lacks valid file names\); restore it from a backup",
    ):
        parse_commit("place", Record({"files": {name: file}, "replaced": []}, 0))
    assert list(parse_commit("place", Record({"files": {"x": file}, "replaced": []}, 0)).files) == [
        "x"
    ]


@pytest.mark.parametrize("name", [["x"], {}, 1, None])
def test_names_that_are_no_text_are_refused(name: object) -> None:
    with pytest.raises(
        CacheError,
        match=r"place: damaged \(it lacks valid file names\); restore it from a backup",
    ):
        parse_commit("place", Record({"files": {}, "replaced": [name]}, 0))


def test_a_copy_follows_what_is_replaced_and_what_is_not(
    prefix: ObjectPrefix, tmp_path: Path
) -> None:
    node = tmp_path / "node"
    other = tmp_path / "other"
    commit(prefix, node, write(tmp_path / "first", table="one"), {"seen": b"1"})
    assert read(prefix, other) == {"table": "one", "seen": "1"}
    commit(prefix, node, write(tmp_path / "second", table="one"), {"seen": b"2"}, is_same=True)
    assert read(prefix, other) == {"table": "one", "seen": "2"}
    commit(prefix, node, write(tmp_path / "third", table="two", more="3"), {"seen": b"3"})
    assert read(prefix, other) == {"table": "two", "seen": "3", "more": "3"}
    commit(prefix, node, write(tmp_path / "fourth", table="two"), {"seen": b"3"})
    assert read(prefix, other) == {"table": "two", "seen": "3"}
    commit(prefix, node, tmp_path / "fourth", {}, is_same=True)
    assert read(prefix, other) == {"table": "two"}


def test_a_copy_of_another_size_is_downloaded_again(prefix: ObjectPrefix, tmp_path: Path) -> None:
    commit(prefix, tmp_path / "node", write(tmp_path / "first", table="one"), {})
    (tmp_path / "node" / FOLDER / "table").write_text("on")
    assert read(prefix, tmp_path / "node") == {"table": "one"}
    (tmp_path / "node" / FOLDER / "table").unlink()
    assert read(prefix, tmp_path / "node") == {"table": "one"}


@pytest.mark.parametrize(("text", "is_new"), [("one", False), ("two", True)])
def test_a_commit_repairs_this_nodes_damaged_copy_of_the_same_size(
    prefix: ObjectPrefix, tmp_path: Path, text: str, is_new: bool
) -> None:
    folders = commit(prefix, tmp_path / "node", write(tmp_path / "a", table="one"), {})
    (tmp_path / "node" / FOLDER / "table").write_text("bad")
    written = write(tmp_path / "b", table=text)

    def is_same(earlier: Path, later: Path) -> bool:
        return (earlier / "table").read_text() == (later / "table").read_text()

    assert folders.commit(FOLDER, written, {}, is_same) is is_new
    assert read(prefix, tmp_path / "node") == {"table": text}


def test_a_damaged_object_is_not_copied(prefix: ObjectPrefix, tmp_path: Path) -> None:
    folders = commit(prefix, tmp_path / "node", write(tmp_path / "first", table="one"), {})
    found = folders.read(FOLDER)
    assert found is not None
    (key,) = found.list_keys(FOLDER)
    prefix.write(key, b"two")
    with pytest.raises(
        CacheError, match=rf"{key}: damaged \(its BLAKE2b digest is .*; build again to repair it"
    ):
        read(prefix, tmp_path / "other")
    assert list((tmp_path / "other" / "generations").iterdir()) == []
    prefix.write(key, b"o")
    with pytest.raises(CacheError, match=r"the object is missing, or its size is not 3 bytes; "):
        read(prefix, tmp_path / "other")


@pytest.mark.parametrize("content", [b"two", b"longer", None])
def test_a_commit_does_not_rely_on_objects_that_were_replaced_or_removed(
    prefix: ObjectPrefix, tmp_path: Path, content: bytes | None
) -> None:
    folders = commit(prefix, tmp_path / "node", write(tmp_path / "first", table="one"), {})
    found = folders.read(FOLDER)
    assert found is not None
    (key,) = found.list_keys(FOLDER)
    if content is None:
        prefix.remove([key])
    else:
        prefix.write(key, content)
    commit(prefix, tmp_path / "node", tmp_path / "first", {}, is_same=True)
    assert read(prefix, tmp_path / "other") == {"table": "one"}


def test_files_that_are_removed_before_their_commit_are_uploaded_again(
    prefix: ObjectPrefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Chain.append

    def append_after_files_were_removed(self: Chain, content: Any, after: int) -> bool:
        monkeypatch.setattr(Chain, "append", append)
        prefix.remove([each.key for each in prefix.list_objects(FOLDER)])
        return append(self, content, after)

    monkeypatch.setattr(Chain, "append", append_after_files_were_removed)
    commit(prefix, tmp_path / "node", write(tmp_path / "first", table="one"), {"seen": b"1"})
    assert read(prefix, tmp_path / "other") == {"table": "one", "seen": "1"}


def test_a_folder_is_removed_once_and_can_be_committed_again(
    prefix: ObjectPrefix, tmp_path: Path
) -> None:
    folders = commit(prefix, tmp_path / "node", write(tmp_path / "first", table="one"), {})
    folders.remove(FOLDER)
    folders.remove(FOLDER)
    assert folders.read(FOLDER) is None
    assert folders.describe_all("generations") == []
    assert [each.key.rpartition("/")[2] for each in prefix.list_objects(FOLDER)] == [
        "0000.json",
        "0001.json",
    ]
    commit(prefix, tmp_path / "node", tmp_path / "first", {})
    assert read(prefix, tmp_path / "other") == {"table": "one"}


def test_leftovers_are_old_and_of_no_present_commit(prefix: ObjectPrefix, tmp_path: Path) -> None:
    folders = commit(prefix, tmp_path / "node", write(tmp_path / "first", table="one"), {})
    prefix.write(f"{FOLDER}/dead/table", b"x")
    later = time.time() + 3600
    assert [each.key for each in folders.find_leftovers("generations", later)] == [
        f"{FOLDER}/dead/table"
    ]
    assert list(folders.find_leftovers("generations", time.time() - 3600)) == []


def test_only_what_is_unfinished_for_a_day_is_removed_from_a_node(tmp_path: Path) -> None:
    old = tmp_path / ".tmp-old"
    new = tmp_path / "a" / ".tmp-new"
    kept = tmp_path / "a" / "table"
    (tmp_path / ".tmp-folder").mkdir()
    new.parent.mkdir()
    for path in (old, new, kept, tmp_path / ".tmp-folder" / "x"):
        path.write_text("x")
    day_before = time.time() - 86_500
    for path in (old, kept, tmp_path / ".tmp-folder"):
        os.utime(path, (day_before, day_before))
    remove_old_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".tmp-new", "a", "table"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [("create_each", lambda *_: 2), ("create", lambda *_: True)],
    ids=["several win", "replaced"],
)
def test_a_store_that_ignores_conditions_is_refused(
    prefix: ObjectPrefix, name: str, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ObjectPrefix, "create_each", lambda *_: 0)
        check_creates_once(prefix)
    monkeypatch.setattr(ObjectPrefix, name, answer)
    with pytest.raises(
        CacheError,
        match=r"this store ignores `If-None-Match: .*use a store that honours it, or keep the cache",
    ):
        check_creates_once(prefix)
    assert prefix.list_objects() == []


def test_a_download_has_the_size_that_was_committed(prefix: ObjectPrefix, tmp_path: Path) -> None:
    prefix.write("x", b"0123456789")
    prefix.download("x", 10, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"0123456789"
    with pytest.raises(
        FileNotFoundError, match="/x: the object is missing, or its size is not 11 bytes"
    ):
        prefix.download("x", 11, tmp_path / "longer")
    with pytest.raises(
        FileNotFoundError, match="/y: the object is missing, or its size is not 10 bytes"
    ):
        prefix.download("y", 10, tmp_path / "missing")
    assert prefix.read("y") is None
    assert not prefix.create("x", b"late")
    assert prefix.read("x") == b"0123456789"


def test_a_new_record_does_not_replace_one_of_another_process(prefix: ObjectPrefix) -> None:
    store = ObjectCacheStore(prefix.location, ObjectOptions())
    store.write_record(RUNS, "a", "x", None)
    store.write_record(RUNS, "a", "x", None)
    with pytest.raises(
        OvertakenError,
        match=r"/runs/a: was changed by another process in the meantime; run the command again$",
    ):
        store.write_record(RUNS, "a", "y", None)
    record = store.read_record(RUNS, "a")
    assert record is not None
    assert record.data == "x"
    store.write_record(RUNS, "a", "y", record)
    with pytest.raises(OvertakenError):
        store.write_record(RUNS, "a", "z", record)
    assert store.read_record(RUNS, "a") == Record("y", record.number + 1)


def test_of_two_that_set_a_record_aside_both_say_where_it_is(prefix: ObjectPrefix) -> None:
    store = ObjectCacheStore(prefix.location, ObjectOptions())
    store.write_record(RUNS, "demo", "a", None)
    place = f"{prefix.location}/runs/demo/0000.json"
    assert [store.set_aside_record(RUNS, "demo") for _ in range(2)] == [place, place]


def test_files_that_do_not_exist_are_not_copied_and_old_copies_of_them_go(
    prefix: ObjectPrefix,
) -> None:
    store = ObjectCacheStore(prefix.location, ObjectOptions())
    assert not store.fetch_file("fragments", "a").exists()
    prefix.write("fragments/a", b"one")
    assert store.fetch_file("fragments", "a").read_bytes() == b"one"
    prefix.remove(["fragments/a"])
    assert not store.fetch_file("fragments", "a").exists()


def test_a_file_that_is_removed_while_files_are_copied(
    prefix: ObjectPrefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectCacheStore(prefix.location, ObjectOptions())
    prefix.write("fragments/a", b"one")
    monkeypatch.setattr(store, "list_files", lambda _: ["a", "gone"])
    store.fetch_files("fragments")
    assert [path.name for path in (store.folder / "fragments").iterdir()] == ["a"]


@pytest.mark.parametrize("hours", [-1, 1])
def test_probes_are_removed_when_they_are_old(prefix: ObjectPrefix, hours: int) -> None:
    store = ObjectCacheStore(prefix.location, ObjectOptions())
    prefix.write(f"{PROBES}/x", b"12")
    found = store.collect_leftovers(time.time() + hours * 3600, dry_run=False)
    assert found == ((1, 2) if hours > 0 else (0, 0))
    assert bool(prefix.list_objects(PROBES)) == (hours < 0)


@pytest.mark.parametrize(("kind", "expected"), [("fragments", b"two"), ("packs", b"one")])
def test_only_files_whose_names_say_what_they_contain_are_read_from_the_copy(
    prefix: ObjectPrefix, kind: str, expected: bytes
) -> None:
    store = ObjectCacheStore(prefix.location, ObjectOptions())
    for content in (b"one", b"two"):
        prefix.write(f"{kind}/a", content)
        path = store.fetch_file(kind, "a")
    assert path.read_bytes() == expected


def test_a_small_file_is_read_where_the_node_cannot_keep_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file where the folder of receipts would be created: root can write where others cannot
    (tmp_path / RECEIPTS).write_bytes(b"")
    copies = Copies(ObjectPrefix("s3://b/x", ObjectOptions()), tmp_path)
    commit = Commit(0, {"roots.json": describe_file("one", b"{}", "")}, frozenset())
    objects = {f"{FOLDER}/one/roots.json": b"{}"}
    monkeypatch.setattr(ObjectPrefix, "read", lambda _, key: objects.get(key))
    assert copies.read_member(FOLDER, commit, "roots.json") == b"{}"
    objects[f"{FOLDER}/one/roots.json"] = b"[]"
    with pytest.raises(CacheError, match=r"one/roots\.json: damaged \(its BLAKE2b digest is"):
        copies.read_member(FOLDER, commit, "roots.json")
    objects.clear()
    with pytest.raises(FileNotFoundError, match=r"one/roots\.json"):
        copies.read_member(FOLDER, commit, "roots.json")


@pytest.mark.usefixtures("obstore")
def test_a_cache_that_was_copied_from_or_to_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs would begin again in silence."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with FaultySource({"b/x/runs/a.json": b"{}"}) as source:
        store = ObjectCacheStore("s3://b/x", parse_options({"s3://": {"endpoint": source.url}}))
        for read in (store.list_records, lambda kind: store.read_record(kind, "a")):
            with pytest.raises(CacheError, match=r"s3://b/x/runs/a\.json: this cache was copied"):
                read(RUNS)
        assert store.read_record(RUNS, "b") is None
    others = {"b/x/runs/a/b/c.json": b"1", "b/x/runs/notes.txt": b"2"}
    with FaultySource(others) as source:
        store = ObjectCacheStore("s3://b/x", parse_options({"s3://": {"endpoint": source.url}}))
        assert store.list_records(RUNS) == []
    folder = LocalCacheStore(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "skips").mkdir()
    (tmp_path / "runs" / "skips" / "0000.json").write_bytes(b"{}")  # of a run of this name
    assert folder.read_record(RUNS, "a") is None
    assert folder.list_records(RUNS) == []
    (tmp_path / "runs" / "a" / "0000.json").write_bytes(b"{}")
    for read in (folder.list_records, lambda kind: folder.read_record(kind, "a")):
        with pytest.raises(CacheError, match=r"/runs/a/0000\.json: this cache was copied"):
            read(RUNS)
