"""Remedies in messages about a cache in an object store: what a message says is done, and then the cache is built and read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.base import Record
from megablend.caches.objects import commits, store
from megablend.caches.objects.commits import Chain
from megablend.caches.objects.store import ObjectCacheStore
from megablend.errors import CacheError
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import ObjectPrefix
from tests.caches.conftest import use_container
from tests.caches.test_remote_cache import configs, samples
from tests.storage.objects.conftest import S3Server
from tests.storage.objects.servers.fill import AzureContainer

Change = Callable[[dict[str, Any]], Any]
"""Of the JSON of a version; what it returns is written in its place."""


def without(*keys: str) -> Change:
    """Remove a field of the record, or of what it contains."""

    def change(record: dict[str, Any]) -> Any:
        inner = record
        for key in keys[:-1]:
            inner = next(iter(inner.values())) if key == "*" else inner[key]
        del inner[keys[-1]]
        return record

    return change


def rename_file(record: dict[str, Any]) -> Any:
    files = record["content"]["files"]
    files["../manifest.json"] = files.pop("manifest.json")
    return record


RECORDS, COMMITS = r"/runs/default/\d+\.json", r"/generations/[0-9a-f]+/commits/\d+\.json"
NOT_JSON = r"damaged \(.*\); restore it from a backup"
NOT_A_VERSION = r"damaged \(not a version of a record\); restore it from a backup"
NEWER = "found format version 2, expected 1; use the version of megablend that wrote it"
DAMAGES: dict[str, tuple[str, Change, str]] = {
    "a cut record": (RECORDS, lambda _: None, NOT_JSON),
    "a record of another kind": (RECORDS, lambda _: [1], NOT_A_VERSION),
    "a record without content": (RECORDS, without("content"), NOT_A_VERSION),
    "a newer record": (RECORDS, lambda record: record | {"format_version": 2}, NEWER),
    "a cut commit": (COMMITS, lambda _: None, NOT_JSON),
    "a commit without a nonce": (COMMITS, without("nonce"), NOT_A_VERSION),
    "a newer commit": (COMMITS, lambda record: record | {"format_version": 2}, NEWER),
    "a commit without files": (
        COMMITS,
        without("content", "files"),
        r"damaged \(it lacks .*files.*\); restore it from a backup",
    ),
    "a commit without a checksum": (
        COMMITS,
        without("content", "files", "*", "blake2b"),
        r"damaged \(it lacks .*blake2b.*\); restore it from a backup",
    ),
    "a commit with a path": (
        COMMITS,
        rename_file,
        r"damaged \(it lacks valid names of files\); restore it from a backup",
    ),
}


@pytest.fixture
def built(tmp_path: Path, remote: str) -> dict[str, Any]:
    """A run in an object store."""
    config = configs(tmp_path, remote)[1]
    megablend.build(config)
    return config


def find_object(config: dict[str, Any], pattern: str) -> tuple[ObjectPrefix, str, bytes]:
    """The last object of a cache whose location ends as a pattern says, and its content."""
    prefix = ObjectPrefix(config["cache"], ObjectOptions())
    key = max(each.key for each in prefix.list_objects() if re.fullmatch(pattern, f"/{each.key}"))
    data = prefix.read(key)
    assert data is not None
    return prefix, key, data


def attempts(config: dict[str, Any]) -> list[Callable[[], Any]]:
    return [lambda: megablend.build(config), lambda: megablend.open(config), lambda: megablend.describe(config)]


def on_another_node(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same run for a node, and a process, that have read nothing of its cache."""
    return config | {"local_cache": str(folder / "another node")}


@pytest.fixture(scope="module")
def restored(
    container: AzureContainer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[list[int]]]:
    """A run in an object store for tests that restore what they damage, and its samples."""
    folder = tmp_path_factory.mktemp("restored")
    with pytest.MonkeyPatch.context() as patch:
        config = configs(folder, use_container(container, folder, patch))[1]
        megablend.build(config)
        return config, samples(config)


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record(tmp_path: Path, restored: tuple[dict[str, Any], list[list[int]]], name: str) -> None:
    pattern, change, says = DAMAGES[name]
    built, expected = restored
    prefix, key, backup = find_object(built, pattern)
    changed = change(json.loads(backup))
    prefix.write(key, backup[:20] if changed is None else json.dumps(changed).encode())
    other = on_another_node(built, tmp_path)
    for attempt in attempts(other):
        with pytest.raises(CacheError, match=says) as caught:
            attempt()
        assert f"{prefix.location}/{key}: " in str(caught.value)
    prefix.write(key, backup)  # "restore it from a backup", or what reads it is the version that wrote it
    for attempt in attempts(other):
        attempt()
    assert samples(other) == expected


def test_a_commit_that_is_removed_while_it_is_read(
    tmp_path: Path, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = samples(built)
    prefix, key, backup = find_object(built, COMMITS)
    other = on_another_node(built, tmp_path)
    read_all = ObjectPrefix.read_all

    def read_after_it_is_removed(self: ObjectPrefix, keys: list[str]) -> list[bytes | None]:
        if key in keys:
            prefix.remove([key])
        return read_all(self, keys)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPrefix, "read_all", read_after_it_is_removed)
        with pytest.raises(CacheError, match=f"{key}: was removed just now; repeat the command"):
            megablend.open(other)
    prefix.write(key, backup)
    assert samples(other) == expected


def test_a_version_that_no_store_creates(built: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = ObjectPrefix(built["cache"], ObjectOptions())
    chain = Chain(prefix, "runs/other")
    with monkeypatch.context() as patch:
        patch.setattr(commits, "_MOST_COLLISIONS", 2)
        patch.setattr(ObjectPrefix, "create", lambda *_: False)  # as two requests that collide, again and again
        says = r"runs/other/0000\.json: cannot be created, although it does not exist: check the store$"
        with pytest.raises(CacheError, match=says):
            chain.append("x", -1)
    assert chain.append("x", -1)
    last = chain.read_last()
    assert last is not None
    assert (last.number, last.data) == (0, "x")


def test_a_file_that_was_written_but_is_gone(built: dict[str, Any]) -> None:
    store = ObjectCacheStore(built["cache"], ObjectOptions())
    name = store.list_files("fragments")[0]
    store.remove("fragments", name)
    says = rf"/fragments/{name}: was written by a rank, but does not exist; build again$"
    with pytest.raises(CacheError, match=says):
        store.fetch_file("fragments", name, is_written=True)
    megablend.build(built)
    assert store.fetch_file("fragments", name, is_written=True).is_file()


def test_a_record_that_another_process_changes(built: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    read_last = Chain.read_last

    def read_before_another_build(self: Chain) -> Record | None:
        last = read_last(self)
        monkeypatch.setattr(Chain, "read_last", read_last)
        megablend.build(built | {"samples": 60})
        return last

    monkeypatch.setattr(Chain, "read_last", read_before_another_build)
    with pytest.raises(
        CacheError, match=r"/runs/default: another process has changed it meanwhile; repeat the command$"
    ):
        megablend.reset_run(built, "default")
    assert len(samples(built | {"samples": 60})) == 60
    megablend.reset_run(built, "default")
    assert megablend.list_runs(built["cache"]) == []


def test_a_damaged_object(tmp_path: Path, built: dict[str, Any]) -> None:
    expected = samples(built)
    prefix, key, data = find_object(built, r"/generations/.*/blocks\.arrow")
    prefix.write(key, data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    other = on_another_node(built, tmp_path)
    with pytest.raises(CacheError, match=f"{key}: damaged: its blake2b is .*; rebuild the index to repair it"):
        samples(other)
    megablend.build(other)
    assert samples(other) == expected


def test_a_store_in_which_several_writes_of_an_object_succeed(
    tmp_path: Path, swift: S3Server, container: AzureContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    swift.admin.make_bucket_if_missing("remedies")
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "node"))
    monkeypatch.setattr(store, "_ROUNDS", 10)
    local, config = configs(tmp_path, "s3://remedies/of/x")
    says = "this store ignores `If-None-Match: .*: use a store that honours it, or a cache in a folder"
    with pytest.raises(CacheError, match=says):
        megablend.build(config)
    megablend.build(local)  # "a cache in a folder"
    for name, value in container.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", container.url)
    config["cache"] = f"az://{container.name}/of/remedies"  # "a store that honours it"
    megablend.build(config)
    assert samples(config) == samples(local)
