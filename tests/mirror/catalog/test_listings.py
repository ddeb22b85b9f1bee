"""Sources that are listed again: real commands and node processes, a real etcd, a source that changes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megablend.errors import DataError
from megablend.mirror.catalog.catalog import EVERY, LATEST, Catalog, Listed, Revision, Want
from megablend.mirror.catalog.listings import Listings
from megablend.mirror.disk.folder import MirrorFolder
from tests.cli.commands import run
from tests.mirror.catalog.test_cluster_datasets import services
from tests.mirror.catalog.test_datasets import (
    MIXED,
    Machine,
    check_folder,
    keys,
    machine,
    make_files,
)
from tests.mirror.catalog.test_etcd_catalog import MB, NAMES, Cluster, LocalMates, work
from tests.mirror.catalog.test_etcd_catalog import until as until_so
from tests.mirror.etcd import EtcdServer
from tests.mirror.nodes import kill_node
from tests.mirror.test_clusters import until
from tests.storage.faulty import Faults, FaultySource

__all__ = ["keys"]
pytestmark = pytest.mark.usefixtures("obstore", "keys")


def revisions(node: Machine, dataset: str = "corpus") -> list[dict[str, Any]]:
    """The latest last."""
    return [each for each in node.ask("list")["revisions"] if each["dataset"] == dataset]


def trouble(node: Machine, dataset: str = "corpus") -> str:
    return str(node.ask("status")["listed"].get(dataset, {}).get("trouble", ""))


def test_a_source_that_changes_is_a_new_revision(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with machine(tmp_path, files) as node:
        first = node.ask("add", "corpus", "s3://b/d/", "--every", "1s")["digest"]
        node.ask("want", "corpus", "--wait")
        node.ask("want", f"corpus@{first[:8]}", "--pin")
        # Listed again, and as it was
        at = node.ask("status")["listed"]["corpus"]["at"]
        until(lambda: node.ask("status")["listed"]["corpus"]["at"] > at)
        assert len(revisions(node)) == 1
        new = files | make_files("d", {"big.bin": 2 * MB + 7, "more": 5}, seed=1)
        node.source.faults = Faults(rate=1e6)
        node.source.files = {f"b/{name}": data for name, data in new.items()}
        until(lambda: len(revisions(node)) == 2)
        second = revisions(node)[-1]
        assert (second["is_found"], second["num_files"], second["every"]) == (True, 5, 1.0)
        # `latest` moves when it is complete
        assert node.ask("path", "corpus")["revision"] == first
        node.source.faults = Faults()
        node.ask("want", "corpus", "--wait")
        found = node.ask("path", "corpus")
        assert found["revision"] == second["digest"]
        check_folder(found["path"], new, "d")
        # What is pinned stays
        check_folder(node.ask("path", f"corpus@{first[:8]}")["path"], files, "d")
        table = node.run("list").stdout
        assert "listing again" in table
        # As it was before: that is the latest one again
        node.source.files = {f"b/{name}": data for name, data in (new | files).items()}
        until(lambda: len(revisions(node)) == 3)
        node.source.files = {f"b/{name}": data for name, data in new.items()}
        until(lambda: revisions(node)[-1]["digest"] == second["digest"])


def test_a_source_that_lost_files_or_cannot_be_listed_changes_nothing(tmp_path: Path) -> None:
    files = make_files("d", MIXED)
    with machine(tmp_path, files) as node:
        node.storage["s3://"]["give_up_after"] = 1
        node.config.write_text(json.dumps({"storage": node.storage}))
        first = node.ask("add", "corpus", "s3://b/d/", "--every", "1s")["digest"]
        node.ask("want", "corpus", "--wait")
        del node.source.files["b/d/sub/mid.bin"]
        node.source.files["b/d/new"] = b"new"
        until(lambda: "1 files no longer exist, such as s3://b/d/sub/mid.bin" in trouble(node))

        def count_failed() -> int:
            status = json.loads(run("node", "status", node.config, "--json").stdout)
            return int(status["listed"]["listings"]["failed"])

        # The log has what is news
        until(lambda: count_failed() > 2)
        assert (node.folder / "node.log").read_text().count("1 files no longer exist") == 1
        told = node.run("list").stdout
        assert "corpus: source listed at 20" in told
        assert f"corpus@{first[:12]} stays the latest revision" in told
        assert "`megablend datasets add corpus SOURCE...` without them" in node.run("status").stdout
        node.source.files.clear()
        until(lambda: "s3://b/d/: matches no files" in trouble(node))
        node.source.is_down = True
        until(lambda: "cannot be listed" in trouble(node) or "cannot be read" in trouble(node))
        assert [each["digest"] for each in revisions(node)] == [first]
        check_folder(node.ask("path", "corpus")["path"], files, "d")
        # It is remembered by the next process, and told until it is well again
        kill_node(node.folder)
        assert trouble(node)
        node.source.is_down = False
        node.source.files = {f"b/{name}": data for name, data in files.items()}
        until(lambda: not trouble(node))
        assert len(revisions(node)) == 1
        # What somebody says himself is done
        del node.source.files["b/d/sub/mid.bin"]
        second = node.add("corpus", "d")
        assert revisions(node)[-1]["digest"] == second
        assert not trouble(node)


def test_files_of_a_long_list_are_asked_for_one_by_one(tmp_path: Path) -> None:
    names = [f"e/{i:04}" for i in range(120)]
    with (
        FaultySource(dict.fromkeys(names, b"x")) as web,
        machine(tmp_path, {}, prefixes=[f"{web.url}/"]) as node,
    ):
        listed = tmp_path / "e.urls"
        listed.write_text("".join(f"{web.url}/{name}\n" for name in names))
        del web.files["e/0077"]
        code, message = node.fail("add", "e", listed)
        assert code == 2
        assert message.startswith(f"{web.url}/e/0077: matches no files\n")
        web.files["e/0077"] = b"x"
        node.ask("add", "e", listed, "--every", "1s")
        node.ask("want", "e", "--wait")
        listed.unlink()
        web.files["e/0007"] = b"other"
        until(lambda: len(revisions(node, "e")) == 2)
        node.ask("want", "e", "--wait")
        assert (Path(node.ask("path", "e")["path"]) / "0007").read_bytes() == b"other"
        del web.files["e/0009"]
        until(lambda: f"{web.url}/e/0009: matches no files" in trouble(node, "e"))


def test_a_source_that_changes_all_the_time_is_held(tmp_path: Path) -> None:
    """A revision follows another one only when that is held, or cannot be."""
    files = make_files("d", {f"{i}": MB for i in range(4)})
    with machine(tmp_path, files) as node:
        first = node.ask("add", "corpus", "s3://b/d/", "--every", "1s")["digest"]
        node.ask("want", "corpus", "--wait")
        node.source.faults = Faults(rate=1e5)
        node.source.files["b/d/0"] = bytes(MB)
        until(lambda: len(revisions(node)) == 2)
        # It is being fetched, for ten seconds: others do not take its place
        node.source.files["b/d/1"] = bytes(MB + 1)

        def count_waiting() -> int:
            status = json.loads(run("node", "status", node.config, "--json").stdout)
            return int(status["listed"]["listings"].get("waiting", 0))

        until(lambda: count_waiting() > 0)
        node.source.faults = Faults()
        until(lambda: len(revisions(node)) == 3)
        assert [each["num_bytes"] - 4 * MB for each in revisions(node)] == [0, 0, 1]
        # What cannot be held is followed by what can
        node.source.faults = Faults(rate=1e5)
        node.source.files["b/d/2"] = bytes(MB + 5)
        until(lambda: len(revisions(node)) == 4)
        node.source.files["b/d/2"] = bytes(MB + 7)
        node.source.faults = Faults()
        until(lambda: len(revisions(node)) == 5)
        node.ask("want", "corpus", "--wait")
        assert revisions(node)[-1]["num_bytes"] == 4 * MB + 8
        assert first not in node.goals()


def test_a_revision_that_only_a_person_can_help_holds_up_no_listing(tmp_path: Path) -> None:
    """Such as an object that must not be read: what is new at the source is found meanwhile."""
    with machine(tmp_path, make_files("d", MIXED)) as node:
        node.ask("add", "corpus", "s3://b/d/", "--every", "1s")
        node.source.denied = "sub/mid.bin"
        node.ask("want", "corpus")
        node.source.files["b/d/new"] = b"new"
        until(lambda: len(revisions(node)) == 2)
        node.source.denied = ""
        node.ask("want", "corpus", "--wait")
        assert (Path(node.ask("path", "corpus")["path"]) / "new").read_bytes() == b"new"


def test_how_often(tmp_path: Path) -> None:
    with machine(tmp_path, make_files("d", MIXED)) as node:
        assert node.ask("add", "corpus", "s3://b/d/")["every"] == EVERY
        assert node.ask("add", "corpus", "s3://b/d/", "--every", "2d")["every"] == 2 * 86400
        # As before, unless something else is said
        assert node.ask("add", "corpus", "s3://b/d/")["every"] == 2 * 86400
        assert node.ask("add", "corpus", "s3://b/d/", "--every", "never")["every"] == 0
        for bad in ("0s", "1", "-1h", "1w", "", "h"):
            code, message = node.fail("add", "corpus", "s3://b/d/", "--every", bad)
            assert code == 2
            assert message.startswith(
                f"--every: found {bad!r}, expected an interval such as 10m, 6h or 1d, or never\n"
            )


def test_what_is_due(tmp_path: Path) -> None:
    """Whatever becomes of the clock; not what nobody wants, nor what is never listed."""
    catalog = Catalog(MirrorFolder.create(tmp_path / "m"))
    nothing: Any = None
    listings = Listings(nothing, nothing, catalog, nothing, nothing, None)
    for name, every in (("a", 60.0), ("b", 0.0), ("c", 60.0)):
        catalog.put_revision(
            Revision(
                dataset=name,
                digest="0" * 32,
                num_files=1,
                num_bytes=1,
                added=0.0,
                sources=(),
                every=every,
            )
        )
    assert listings._find_own() == []
    for name in ("a", "b"):
        catalog.put_want(Want(dataset=name, revision="latest", since=0.0))
    assert [each.dataset for each in listings._find_own()] == ["a"]
    catalog.put_listed("a", Listed(time.time(), "x" * 10))
    catalog.put_listed("gone", Listed(time.time(), ""))
    catalog.put_listed("a", Listed(time.time(), "why"))
    assert set(Catalog(MirrorFolder.attach(tmp_path / "m")).listed) == {"a"}
    assert listings.describe()["a"]["trouble"] == "why"


async def _listed_by(node: LocalMates, dataset: str) -> str:
    return str((await node.ask("list"))["listed"].get(dataset, {}).get("by", ""))


def test_one_node_of_a_cluster_lists_a_dataset(tmp_path: Path, etcd: EtcdServer) -> None:
    """Others go on when it is gone, and all know the revision, and what is wrong with the source."""
    cluster = Cluster(tmp_path, etcd, *NAMES)
    cluster.write("d", {"x": 3 * MB, "y": 5})

    async def do() -> None:
        async with cluster.all() as nodes:
            by_name = {node.own: node for node in nodes}
            added = await nodes[0].add("corpus", "d")
            await nodes[0].ask("want", target="corpus")
            await nodes[0].ask("wait", target="corpus")
            sources = [f"{cluster.source}/d/"]
            await nodes[0].ask("add", dataset="corpus", sources=sources, every=0.5)
            await until_so(lambda: _listed_by(nodes[1], "corpus"))
            home = by_name[await _listed_by(nodes[1], "corpus")]
            for node in nodes:
                await until_so(lambda node=node: _listed_by(node, "corpus"))  # type: ignore[misc]
                assert await _listed_by(node, "corpus") == home.own
            cluster.write("d", {"x": 3 * MB}, seed=1)

            async def has_new(node: LocalMates) -> bool:
                found = (await node.ask("list"))["revisions"]
                return bool(found[-1]["digest"] != added["digest"] and found[-1]["by"] == home.own)

            for node in nodes:
                await until_so(partial(has_new, node))
            await nodes[0].ask("wait", target="corpus")
            assert [node.datasets.listings.counts["new"] for node in nodes if node is not home] == [
                0,
                0,
            ]
            others = [node for node in nodes if node is not home]
            assert not any(node.datasets.listings.counts for node in others)

            # Its lease has ended: it lists nothing, and the view is without it
            await home.etcd._ask("lease/revoke", {"ID": str(home.lease)})
            home.lease = 0
            count = sum(home.datasets.listings.counts.values())
            cluster.names = tuple(node.own for node in others)
            (cluster.source / "d" / "y").unlink()

            async def is_told(node: LocalMates) -> bool:
                told = (await node.ask("status"))["listed"].get("corpus", {})
                return (
                    "1 files no longer exist" in told.get("trouble", "") and told["by"] != home.own
                )

            for node in others:
                await until_so(partial(is_told, node))
            assert sum(home.datasets.listings.counts.values()) <= count + 1
            assert len((await others[0].ask("list"))["revisions"]) == 2

    work(do)


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_revision_that_was_lost_with_its_node_holds_up_nothing(
    has_changed: bool, tmp_path: Path, etcd: EtcdServer
) -> None:
    """Nobody has got its manifest from the node that made it: the source is listed again."""
    cluster = Cluster(tmp_path, etcd, "a:1", "b:1")
    cluster.write("d", {"x": 3 * MB, "y": 5})

    async def do() -> None:
        async with cluster.all() as (a, b):
            sources = [f"{cluster.source}/d/"]
            await a.ask("add", dataset="corpus", sources=sources, every=0.5)
            await a.ask("want", target="corpus")
            await b.ask("wait", target="corpus")
        cluster.names = ("a:1",)
        cluster.write("d", {"x": 3 * MB}, seed=1)

        async def has(node: LocalMates, count: int) -> bool:
            found = (await node.ask("list"))["revisions"]
            return len(found) == count and found[-1]["by"] == node.own

        async with cluster.node("a:1") as a:
            await until_so(partial(has, a, 2))
        cluster.names = ("b:1",)
        if has_changed:
            cluster.write("d", {"x": 3 * MB}, seed=2)
        async with cluster.node("b:1") as b:
            await until_so(partial(has, b, 2 + has_changed))
            await b.ask("wait", target="corpus")
            assert [each["missing"] for each in (await b.ask("status"))["goals"]] == [0]

    work(do)


def test_what_was_removed_meanwhile_is_not_put(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, etcd, "a:1")
    cluster.write("d", {"x": 5})

    async def do() -> None:
        async with cluster.all() as (a,):
            await a.add("corpus", "d")
            datasets = a.datasets
            (latest,) = datasets.catalog.list_revisions("corpus")
            cluster.write("d", {"x": 5}, seed=1)
            keep = datasets.listings._store_manifest

            async def keep_slowly(*about: Any) -> Revision:
                kept = await keep(*about)
                await a.ask("remove", dataset="corpus")
                return kept

            monkeypatch.setattr(datasets.listings, "_store_manifest", keep_slowly)
            assert await datasets.listings._check_source(latest, "") == ""
            assert (await a.ask("list"))["revisions"] == []
            assert not [each for each in a.shared.values if "revisions" in each]

    work(do)


def test_a_source_that_fails_when_its_dataset_has_been_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog(MirrorFolder.create(tmp_path / "m"))
    revisions = [
        Revision(
            dataset=name,
            digest="0" * 32,
            num_files=1,
            num_bytes=1,
            added=0.0,
            sources=(),
            every=60.0,
        )
        for name in "ab"
    ]
    for each in revisions:
        catalog.put_revision(each)
    catalog.put_want(Want(dataset="a", revision=LATEST, since=0.0))
    catalog.put_listed("a", Listed(0.0, ""))

    async def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def ask(_: object) -> None:
        catalog.remove_revision(revisions[0])
        catalog.put_listed("b", Listed(0.0, ""))
        raise DataError("s3://b/x", "is not there for a moment")

    async def is_held(_: Revision) -> bool:
        return True

    async def do() -> None:
        nothing: Any = None
        engine: Any = SimpleNamespace(call=call)
        source: Any = SimpleNamespace(ask=ask)
        listings = Listings(engine, source, catalog, nothing, is_held, None)
        running = asyncio.ensure_future(listings.run())
        await asyncio.sleep(0.1)
        assert listings.counts["failed"] == 1
        running.cancel()

    asyncio.run(do())
    assert "the source of a: s3://b/x" in caplog.text


def test_without_etcd_nothing_is_listed(tmp_path: Path, etcd: EtcdServer) -> None:
    """Who is not heard by etcd may not be the only one."""
    cluster = Cluster(tmp_path, etcd, "a:1")
    cluster.write("d", {"x": 5})

    async def do() -> None:
        async with cluster.all() as (a,):
            sources = [f"{cluster.source}/d/"]
            await a.ask("add", dataset="corpus", sources=sources, every=0.5)
            await a.ask("want", target="corpus")
            counts = a.datasets.listings.counts

            async def is_listed_more_than(count: int) -> bool:
                return counts["same"] > count

            await until_so(partial(is_listed_more_than, 0))
            etcd.stop()
            assert (await a.ask("list"))["revisions"]
            assert a.etcd.away_since is not None
            count = sum(counts.values())
            await asyncio.sleep(2.5)
            assert sum(counts.values()) <= count + 1
            etcd.start()
            await until_so(partial(is_listed_more_than, counts["same"]))

    work(do)


def test_another_node_lists_when_the_one_that_did_has_died(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    files = make_files("d", MIXED)
    with services(tmp_path, files, etcd, 3) as nodes:
        nodes[0].ask("add", "corpus", "s3://b/d/", "--every", "1s")
        nodes[0].ask("want", "corpus", "--copies", "all", "--wait")
        source = nodes[0].source
        sizes = {"big.bin": MB, "new": 5}

        def change(seed: int) -> None:
            new = files | make_files("d", sizes, seed=seed)
            source.files = {f"b/{name}": data for name, data in new.items()}

        change(1)
        until(lambda: len(revisions(nodes[0])) == 2)
        home = revisions(nodes[0])[-1]["by"]
        (dead,) = [node for node in nodes if node.storage["mirror"]["advertise"] == home]
        others = [node for node in nodes if node is not dead]
        dead.kill()
        change(2)
        until(lambda: len(revisions(others[0])) == 3)
        assert revisions(others[1])[-1]["by"] != home
        for node in others:
            node.wait_for_view(2)
        held = others[0].ask("want", "corpus", "--copies", "all", "--wait")
        assert held["complete"] == 2
        for node in others:
            check_folder(
                node.ask("path", "corpus")["path"],
                {name.removeprefix("b/"): data for name, data in source.files.items()},
                "d",
            )
