"""Messages about a cache in an object store: what they say is done, and then the cache is built and read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
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
from tests.behaviour.remedies.driver import Bench, Fault, Step, fault, table
from tests.caches.conftest import use_container
from tests.caches.test_remote_cache import configs, samples
from tests.storage.objects.conftest import S3Server, plain_environment
from tests.storage.objects.servers.fill import AzureContainer

__all__ = ["plain_environment"]
Change = Callable[[Any], Any]
"""Of the JSON of a version; what it returns is written in its place, None for the half of what was there."""


class Remote(Bench):
    """A run whose cache is in an object store, read by a node, and a process, that have read nothing of it."""

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path,
        patch: pytest.MonkeyPatch,
        expected: list[list[int]],
    ) -> None:
        self.config = config | {"local_cache": str(folder / "another node")}
        self.patch = patch
        self.prefix = ObjectPrefix(config["cache"], ObjectOptions())
        self.store = ObjectCacheStore(config["cache"], ObjectOptions())
        self.expected = expected

    def find(self, pattern: str) -> str:
        """The key of the last object that ends as a pattern says."""
        return max(
            each.key for each in self.prefix.list_objects() if re.fullmatch(pattern, f"/{each.key}")
        )

    def keep(self, pattern: str) -> bytes:
        """Keep an object for `restore`."""
        self.key = self.find(pattern)
        data = self.prefix.read(self.key)
        assert data is not None
        self.backup = data
        return data

    def use(self) -> None:
        assert samples(self.config) == self.expected

    def build(self) -> None:
        megablend.build(self.config)


@pytest.fixture(scope="module")
def shared(
    container: AzureContainer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[list[int]]]:
    """A run for faults that are mended without a trace, and its samples."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        config = configs(folder, use_container(container, folder, patch))[1]
        megablend.build(config)
        return config, samples(config)


@pytest.fixture
def restored(
    shared: tuple[dict[str, Any], list[list[int]]], remote: str, tmp_path: Path
) -> Iterator[Remote]:
    config, expected = shared
    with pytest.MonkeyPatch.context() as patch:
        yield Remote(config, tmp_path, patch, expected)


@pytest.fixture
def bench(tmp_path: Path, remote: str) -> Iterator[Remote]:
    """A run of its own."""
    config = configs(tmp_path, remote)[1]
    megablend.build(config)
    with pytest.MonkeyPatch.context() as patch:
        yield Remote(config, tmp_path, patch, samples(config))


def change(pattern: str, how: Change) -> Step:
    def make(bench: Remote) -> None:
        data = bench.keep(pattern)
        changed = how(json.loads(data))
        bench.prefix.write(
            bench.key, data[:20] if changed is None else json.dumps(changed).encode()
        )

    return make


def restore(bench: Remote) -> None:
    """From a backup; or what reads it is the version that wrote it."""
    bench.patch.undo()
    bench.prefix.write(bench.key, bench.backup)


def without(*keys: str) -> Change:
    """Remove a field of the record, or of what it contains."""

    def remove(record: dict[str, Any]) -> Any:
        inner = record
        for key in keys[:-1]:
            inner = next(iter(inner.values())) if key == "*" else inner[key]
        del inner[keys[-1]]
        return record

    return remove


def rename_file(record: dict[str, Any]) -> Any:
    files = record["content"]["files"]
    files["../manifest.json"] = files.pop("manifest.json")
    return record


def newer(record: dict[str, Any]) -> Any:
    return record | {"format_version": 2}


def flip_a_bit(bench: Remote) -> None:
    data = bench.keep(r"/generations/.*/blocks\.arrow")
    bench.prefix.write(bench.key, data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])


def remove_while_it_is_read(bench: Remote) -> None:
    """Another process removes a commit."""
    bench.keep(COMMITS)
    read_all = ObjectPrefix.read_all

    def read_after_it_is_removed(self: ObjectPrefix, keys: list[str]) -> list[bytes | None]:
        if bench.key in keys:
            bench.prefix.remove([bench.key])
        return read_all(self, keys)

    bench.patch.setattr(ObjectPrefix, "read_all", read_after_it_is_removed)


def change_while_it_is_read(bench: Remote) -> None:
    """Another process builds while the run is reset."""
    read_last = Chain.read_last

    def read_before_another_build(self: Chain) -> Record | None:
        last = read_last(self)
        if self.key == "runs/default":
            bench.patch.setattr(Chain, "read_last", read_last)
            megablend.build(bench.config | {"samples": 60})
        return last

    bench.patch.setattr(Chain, "read_last", read_before_another_build)


def remove_fragment(bench: Remote) -> None:
    (bench.name, *_) = bench.store.list_files("fragments")  # type: ignore[attr-defined]
    bench.store.remove("fragments", bench.name)  # type: ignore[attr-defined]


def fetch_fragment(bench: Any) -> None:
    assert bench.store.fetch_file("fragments", bench.name, is_written=True).is_file()


RECORDS = r"/runs/default/\d+\.json"
COMMITS = r"/generations/[0-9a-f]+/commits/\d+\.json"
NOT_JSON = r"damaged \(.*\); restore it from a backup"
NOT_A_VERSION = r'damaged \(its JSON has no "nonce" or no "content"\); restore it from a backup'
NEWER = "found format version 2, expected 1; use the version of megablend that wrote it"
ATTEMPTS = {"build": megablend.build, "open": megablend.open, "describe": megablend.describe}


def damaged(
    name: str, pattern: str, how: Change, says: str, *, quick: Collection[str] = ("open",)
) -> list[Fault]:
    """Whatever reads it says so; `quick` attempts do so every time."""
    return [
        fault(
            f"{name}, {verb}",
            change(pattern, how),
            f"{pattern}: {says}",
            restore,
            fails=lambda bench, attempt=attempt: attempt(bench.config) and None,
            works=Remote.use,
            marks=() if verb in quick else (pytest.mark.slow,),
        )
        for verb, attempt in ATTEMPTS.items()
    ]


# fmt: off
test_records = table(
    *damaged("a cut record", RECORDS, lambda _: None, NOT_JSON, quick=ATTEMPTS),
    *damaged("a record of another kind", RECORDS, lambda _: [1], NOT_A_VERSION),
    *damaged("a record without content", RECORDS, without("content"), NOT_A_VERSION),
    *damaged("a newer record", RECORDS, newer, NEWER),
    *damaged("a cut commit", COMMITS, lambda _: None, NOT_JSON, quick=ATTEMPTS),
    *damaged("a commit without a nonce", COMMITS, without("nonce"), NOT_A_VERSION),
    *damaged("a newer commit", COMMITS, newer, NEWER),
    *damaged("a commit without files", COMMITS, without("content", "files"),
    r"damaged \(it lacks .*files.*\); restore it from a backup"),
    *damaged("a commit without a checksum", COMMITS, without("content", "files", "*", "blake2b"),
             r"damaged \(it lacks .*blake2b.*\); restore it from a backup"),
    *damaged("a commit with a path", COMMITS, rename_file,
             r"damaged \(it lacks valid file names\); restore it from a backup"),
    bench="restored",
)

test_changes = table(
    fault("a commit that is removed while it is read", remove_while_it_is_read,
          f"{COMMITS}: was removed while it was being read; run the command again",
          restore, fails=lambda bench: megablend.open(bench.config) and None, works=Remote.use),
    fault("a file that was written but is gone", remove_fragment,
          r"/fragments/\S+: was written by a rank, but does not exist; build again$",
          Remote.build, fails=fetch_fragment),
    fault("a record that another process changes", change_while_it_is_read,
          r"/runs/default: was changed by another process in the meantime; run the command again$", (),
          fails=lambda bench: megablend.reset_run(bench.config, "default") and None),
    fault("a damaged object", flip_a_bit, r"/blocks\.arrow: damaged \(its BLAKE2b digest is .*; build again to repair it",
          Remote.build),
)
# fmt: on


def test_a_version_that_no_store_creates(bench: Remote) -> None:
    chain = Chain(bench.prefix, "runs/other")
    with bench.patch.context() as patch:
        patch.setattr(commits, "_MAX_COLLISIONS", 2)
        patch.setattr(
            ObjectPrefix, "create", lambda *_: False
        )  # as two requests that collide, again and again
        says = r"runs/other/0000\.json: the object store refused 2 requests to create it, although it does not exist; run the"
        with pytest.raises(CacheError, match=says):
            chain.append("x", -1)
    assert chain.append("x", -1)
    last = chain.read_last()
    assert last is not None
    assert (last.number, last.data) == (0, "x")


def test_a_store_in_which_several_writes_of_an_object_succeed(
    tmp_path: Path, swift: S3Server, container: AzureContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    swift.admin.make_bucket_if_missing("remedies")
    monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "node"))
    monkeypatch.setattr(store, "_ROUNDS", 10)
    local, config = configs(tmp_path, "s3://remedies/of/x")
    says = "this store ignores `If-None-Match: .*; use a store that honours it, or keep the cache in a folder"
    with pytest.raises(CacheError, match=says):
        megablend.build(config)
    megablend.build(local)  # "keep the cache in a folder"
    for name, value in container.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", container.url)
    config["cache"] = f"az://{container.name}/of/remedies"  # "a store that honours it"
    megablend.build(config)
    assert samples(config) == samples(local)
