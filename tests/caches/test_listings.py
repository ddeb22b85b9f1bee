"""Listings that lag behind what was written and removed, and clocks that differ: what is committed does not depend on them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import megablend
from megablend.caches.objects.commits import Chain
from megablend.caches.objects.store import ObjectCacheStore
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects import prefix as module
from megablend.storage.objects.prefix import ObjectEntry, ObjectPrefix
from megablend.storage.store_options import parse_options
from tests.caches.objects.test_unused_copies import find_nodes
from tests.caches.test_remote_cache import configs, samples
from tests.runs import documents, write_source
from tests.storage.faulty import FaultySource


class LateListings:
    """Makes listings of all prefixes lag: each change is missing from some of the `lag` listings after it, by chance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, lag: int) -> None:
        self._random = random.Random(seed)
        self._lag = lag
        self._written: dict[str, int] = {}
        self._removed: dict[str, tuple[int, ObjectEntry]] = {}
        self._listings = self.hidden = self.shown = 0
        self._list = ObjectPrefix.list_objects
        write_all = ObjectPrefix.write_all
        create_each = ObjectPrefix.create_each
        remove = ObjectPrefix.remove

        def write(prefix: ObjectPrefix, objects: Mapping[str, bytes | Path]) -> dict[str, str]:
            self._note_written(prefix, objects)
            return write_all(prefix, objects)

        def create(prefix: ObjectPrefix, key: str, data: Sequence[bytes]) -> int:
            self._note_written(prefix, [key])
            return create_each(prefix, key, data)

        def remove_and_note(prefix: ObjectPrefix, keys: Sequence[str]) -> None:
            for each in self._list(prefix):
                if each.key in keys:
                    self._removed[f"{prefix.location}/{each.key}"] = self._listings, each
            remove(prefix, keys)

        monkeypatch.setattr(ObjectPrefix, "write_all", write)
        monkeypatch.setattr(ObjectPrefix, "create_each", create)
        monkeypatch.setattr(ObjectPrefix, "remove", remove_and_note)
        monkeypatch.setattr(ObjectPrefix, "list_objects", self._make_list())

    def _note_written(self, prefix: ObjectPrefix, keys: Any) -> None:
        for key in keys:
            self._written.setdefault(f"{prefix.location}/{key}", self._listings)
            self._removed.pop(f"{prefix.location}/{key}", None)

    def _is_late(self, since: int) -> bool:
        return self._listings - since <= self._lag and self._random.random() < 0.5

    def _make_list(self) -> Callable[..., list[ObjectEntry]]:
        def list_objects(prefix: ObjectPrefix, folder: str = "") -> list[ObjectEntry]:
            self._listings += 1
            found = self._list(prefix, folder)
            never = -self._lag - 1
            seen = [
                each
                for each in found
                if not self._is_late(self._written.get(f"{prefix.location}/{each.key}", never))
            ]
            self.hidden += len(found) - len(seen)
            there = {each.key for each in found}
            for place, (since, each) in self._removed.items():
                is_below = place.startswith(
                    f"{prefix.location}/{folder}/" if folder else f"{prefix.location}/"
                )
                if is_below and each.key not in there and self._is_late(since):
                    seen.append(each)
                    self.shown += 1
            return sorted(seen)

        return list_objects


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
)
def test_runs_and_indexes_are_right_where_listings_lag(
    seed: int, tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, config = configs(tmp_path, remote, run="demo")
    late = LateListings(monkeypatch, seed, lag=30)

    def check(**settings: Any) -> str:
        """Build on one node, read on another, and compare both with a cache in a folder."""
        monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / "builder"))
        expected = megablend.build(local | settings)
        found = megablend.build(config | settings)
        assert found.index.digest == expected.index.digest
        assert found.ledger == expected.ledger
        monkeypatch.setenv("MEGABLEND_LOCAL_CACHE", str(tmp_path / f"reader{time.monotonic_ns()}"))
        assert samples(config | settings) == samples(local | settings)
        return found.index.digest

    first = check()
    check(samples=60)
    write_source(tmp_path / "data" / "more", 0, "parquet", documents(0, 9, 9, seed=2))
    for path in (tmp_path / "data" / "more" / "source0").iterdir():
        path.rename(tmp_path / "data" / "source0" / f"more-{path.name}")
    assert check(run="second") != first
    megablend.gc(remote)
    assert samples(config | {"samples": 60}) == samples(local | {"samples": 60})
    megablend.remove_run(remote, "demo")
    time.sleep(1.1)  # the store's clock counts seconds
    megablend.gc(remote, older_than_days=0)
    for path in (tmp_path / "data" / "source0").glob("more-*"):
        path.unlink()
    check(run="third")  # of the first index again, which was removed
    assert megablend.verify(remote).problems == ()
    assert late.hidden
    assert late.shown


def test_a_version_that_is_not_listed_yet_is_the_last_one(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(ObjectPrefix(remote, ObjectOptions()), "runs/a")
    for number in range(3):
        assert chain.append(str(number), number - 1)
    original = ObjectPrefix.list_objects
    for listed in (0, 1, 3):
        monkeypatch.setattr(
            ObjectPrefix, "list_objects", lambda *each, listed=listed: original(*each)[:listed]
        )
        last = chain.read_last()
        assert last is not None
        assert (last.number, last.data) == (2, "2")


@pytest.mark.parametrize("days", [-40, 40])
def test_gc_goes_by_the_clock_of_the_store_there_and_by_that_of_the_node_here(
    days: int, tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_entry = module._make_entry

    def make_later(key: str, meta: Mapping[str, Any]) -> ObjectEntry:
        found = make_entry(key, meta)
        return found._replace(modified=found.modified + days * 86400)

    monkeypatch.setattr(module, "_make_entry", make_later)
    _, config = configs(tmp_path, remote)
    digest = megablend.build(config).index.digest
    (node,) = find_nodes(tmp_path)
    prefix = ObjectPrefix(remote, ObjectOptions())
    prefix.write(f"generations/{digest}/dead/blocks.arrow", b"of a killed build")
    before = {each.key for each in prefix.list_objects()}
    assert megablend.gc(remote, older_than_days=1).other_files == 0
    assert {each.key for each in prefix.list_objects()} == before
    assert (node / "generations" / digest).is_dir()
    time.sleep(1.1)  # the store's clock counts seconds
    assert megablend.gc(remote, older_than_days=0).other_files > 0
    assert f"generations/{digest}/dead/blocks.arrow" not in {
        each.key for each in prefix.list_objects()
    }
    assert ObjectCacheStore(remote, ObjectOptions()).now() == pytest.approx(
        time.time() + days * 86400, abs=100
    )


@pytest.mark.usefixtures("obstore")
def test_markers_of_folders_are_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty objects whose keys end in a slash, which consoles create."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    markers = (
        "b/x/",
        "b/x/fragments/",
        "b/x/fragments/sub/",
        "b/x/generations/",
        "b/x/runs/",
        "b/x/runs/a/",
    )
    own = f"{'a' * 16}-{'b' * 32}"
    others = {
        "b/x/fragments/sub/b": b"2",
        "b/x/fragments/notes.txt": b"3",
        "b/x/fragments/abc": b"4",
    }
    with FaultySource(
        dict.fromkeys(markers, b"") | {f"b/x/fragments/{own}": b"1"} | others
    ) as source:
        store = ObjectCacheStore("s3://b/x", parse_options({"s3://": {"endpoint": source.url}}))
        assert store.list_files("fragments") == [own]
        assert store.list_folders("generations") == []
        assert store.list_records("runs") == []
        assert not store.exists()


def test_objects_of_others_are_left_alone(tmp_path: Path, remote: str) -> None:
    """By builds, `verify` and `gc`: also where everything else is the cache's."""
    _, config = configs(tmp_path, remote)
    prefix = ObjectPrefix(remote, ObjectOptions())
    others = {
        "fragments/notes.txt",
        "packs/notes.txt",
        "splits/_SUCCESS",
        "generations/old/copy/blocks",
        "notes.txt",
    }
    prefix.write_all(dict.fromkeys(others, b"notes"))
    time.sleep(1.1)  # the store's clock counts seconds
    megablend.build(config)
    assert megablend.verify(remote).problems == ()
    megablend.gc(remote, older_than_days=0)
    assert {each.key for each in prefix.list_objects()} >= others
