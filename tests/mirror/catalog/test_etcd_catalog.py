"""The catalog of a cluster: real nodes' datasets in one process, a real etcd; they call each other directly."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megablend.errors import ConfigError, DataError, MissingFileError, ResourceError
from megablend.mirror.catalog.catalog import Want
from megablend.mirror.catalog.datasets import Datasets
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.members.etcd import Etcd, EtcdAwayError
from megablend.mirror.members.followed import Followed
from megablend.mirror.node.engine import AwayError, Engine
from megablend.mirror.node.needs import Needs
from megablend.mirror.node.source_reads import SourceReader
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions
from megablend.system.limited_json import parse_json
from tests.mirror.etcd import EtcdServer

PREFIX = "test/v1/"
MB = 1 << 20


class Cluster:
    """Nodes that share an etcd and a source, which is a folder; `names` are those of the view."""

    def __init__(self, place: Path, etcd: EtcdServer, *names: str) -> None:
        self.place = place
        self.etcd = etcd
        self.names = names
        self.running: dict[str, LocalMates] = {}
        self.source = place / "source"

    def write(self, folder: str, sizes: dict[str, int], seed: int = 0) -> int:
        """Files of the source. Returns: their bytes."""
        draw = random.Random(f"{folder} {seed}")
        for name, size in sizes.items():
            path = self.source / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(draw.randbytes(size))
        return sum(sizes.values())

    @contextlib.asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[LocalMates]:
        """A node, until the context ends."""
        node = LocalMates(self, name)
        await node.start()
        try:
            yield node
        finally:
            await node.stop()

    @contextlib.asynccontextmanager
    async def all(self) -> AsyncIterator[list[LocalMates]]:
        """All nodes of the view."""
        async with contextlib.AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.node(name)) for name in self.names]


class LocalMates:
    """A node, and what its datasets see of the others."""

    copies = 1

    def __init__(self, cluster: Cluster, own: str) -> None:
        self.own = own
        self.views = self
        self.prefix = PREFIX
        self.lease = 0
        self._cluster = cluster
        self.folder = cluster.place / own.replace(":", "-")
        self.etcd = Etcd([cluster.etcd.url], patience=1.0)
        self.shared = Followed(self.etcd, f"{PREFIX}shared/")
        self.datasets: Datasets
        self.source: SourceReader

    @property
    def names(self) -> Sequence[str]:
        return self._cluster.names

    def find_away(self) -> Collection[str]:
        return self._cluster.names - self._cluster.running.keys()

    async def meet(self) -> None:
        pass

    async def post(self, node: str, path: str, body: bytes) -> bytes:
        other = self._cluster.running.get(node)
        if other is None:
            raise AwayError(f"{node} is away")
        shared = other.datasets.shared
        assert shared is not None
        return await shared.answer(path, body)

    async def start(self) -> None:
        source = str(self._cluster.source)
        options = parse_mirror(
            {"folder": str(self.folder), "prefixes": [source], "reserve": 0, "size": 64 * MB}
        )
        self.source = SourceReader(options, ObjectOptions())
        self.store = PageStore(MirrorFolder.create(self.folder), size=64 * MB, reserve=0)
        self.engine = Engine(self.store, self.source)
        needs = Needs(self.engine)
        cluster: Any = self  # it has what datasets use of a Cluster
        self.datasets = await Datasets.open(self.engine, self.source, needs, cluster)
        with contextlib.suppress(EtcdAwayError):
            self.lease = await self.etcd.grant(60)
        self._cluster.running[self.own] = self
        self._tasks = [
            asyncio.ensure_future(each) for each in (self.shared.run(), self.datasets.run())
        ]

    async def stop(self) -> None:
        self._cluster.running.pop(self.own, None)
        for each in self._tasks:
            each.cancel()
        await asyncio.wait(self._tasks)
        for each in self._tasks:
            assert each.cancelled() or each.exception() is None
        await self.engine.close()
        await self.etcd.close()

    async def ask(self, verb: str, **about: Any) -> dict[str, Any]:
        return await self.datasets.answer({"verb": verb, **about})

    async def add(self, name: str, folder: str) -> dict[str, Any]:
        return await self.ask("add", dataset=name, sources=[f"{self._cluster.source}/{folder}/"])

    async def targets(self) -> list[str]:
        """What is wanted, as this node knows."""
        return sorted((await self.ask("list"))["wants"])

    async def is_as_etcd(self) -> bool:
        """Whether the copy is of the catalog that etcd has now."""
        values, _ = await self.etcd.get(f"{PREFIX}shared/catalog")
        seen = await self.engine.call(self.datasets.catalog.get_seen)
        return [parse_json(each.data) for each in values.values()] == [list(seen)]

    async def held(self) -> int:
        """Bytes of files that are held."""
        return (await self.engine.call(self.store.usage)).num_bytes


def work(do: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(do(), 150)

    asyncio.run(run())


async def until(find: Callable[[], Awaitable[object]]) -> None:
    while not await find():
        await asyncio.sleep(0.05)


NAMES = ("a:1", "b:1", "c:1")
SIZES = {"x.bin": 9 * MB, "y.bin": 300_000, "z": 7}


def test_what_is_wanted_on_one_node_is_held_by_all(tmp_path: Path, etcd: EtcdServer) -> None:
    cluster = Cluster(tmp_path, etcd, *NAMES)
    size = cluster.write("d", SIZES)

    async def do() -> None:
        async with cluster.all() as (a, b, c):
            added = await a.add("corpus", "d")
            assert added["by"] == "a:1"
            for node in (b, c):
                await until(partial(_knows, node, "corpus"))
            assert await b.ask("want", target="corpus") == {"want": "corpus@latest"}
            await until(lambda: _equals(c.targets, ["corpus@latest"]))
            found = await c.ask("wait", target="corpus")
            assert (found["nodes"], found["complete"], found["missing"]) == (3, 3, 0)
            shares = [(await node.ask("status"))["goals"][0]["bytes"] for node in (a, b, c)]
            # Each piece on one node; sizes are those of pages
            assert size <= sum(shares) < size + 3 * 4096
            assert sum([node.source.num_bytes for node in (a, b, c)]) < size + 100
            whole = await a.ask("want", target="corpus", whole=True)
            assert whole == {"want": "corpus@latest"}
            await a.ask("wait", target="corpus")
            for node in (a, b, c):
                path = Path((await node.ask("path", target="corpus"))["path"])
                for name in SIZES:
                    assert (path / name).read_bytes() == (cluster.source / "d" / name).read_bytes()
            status = await a.ask("status")
            assert (status["away"], status["trouble"]) == ([], "")
            await c.ask("unwant", target="corpus")
            await until(lambda: _has_none(a))

    work(do)


async def _knows(node: LocalMates, dataset: str) -> bool:
    return dataset in {each["dataset"] for each in (await node.ask("list"))["revisions"]}


async def _has_none(node: LocalMates) -> bool:
    return not (await node.ask("status"))["goals"]


def test_a_node_that_comes_late_has_manifests_from_those_that_are_there(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    """Also where the node that listed the source is gone, and the source, too."""
    cluster = Cluster(tmp_path, etcd, *NAMES)
    cluster.write("d", SIZES)

    async def do() -> None:
        async with cluster.node("b:1") as b:
            async with cluster.node("a:1") as a:
                digest = (await a.add("corpus", "d"))["digest"]
                await a.ask("want", target="corpus", whole=True)
                await until(lambda: _is_complete(b))
            shutil.rmtree(cluster.source)
            async with cluster.node("c:1") as c:
                manifest = c.folder / "manifests" / f"{digest}.zlib"
                while not manifest.exists():
                    await asyncio.sleep(0.05)
                while [each["revision"] for each in (await c.ask("status"))["goals"]] != [digest]:
                    await asyncio.sleep(0.05)
                assert (
                    manifest.read_bytes() == (b.folder / "manifests" / manifest.name).read_bytes()
                )
                assert (await c.ask("status"))["away"] == ["a:1"]

    work(do)


async def _is_complete(node: LocalMates) -> bool:
    goals = (await node.ask("status"))["goals"]
    return bool(goals) and not any(each["missing"] for each in goals)


def test_a_damaged_manifest_comes_from_another_node(tmp_path: Path, etcd: EtcdServer) -> None:
    cluster = Cluster(tmp_path, etcd, "a:1", "b:1")
    cluster.write("d", SIZES)

    async def do() -> None:
        async with cluster.node("a:1") as a:
            async with cluster.node("b:1") as b:
                digest = (await a.add("corpus", "d"))["digest"]
                await a.ask("want", target="corpus", whole=True)
                await until(lambda: _is_complete(b))
            shutil.rmtree(cluster.source)
            manifest = b.folder / "manifests" / f"{digest}.zlib"
            right = manifest.read_bytes()
            manifest.write_bytes(right[:40] + bytes([right[40] ^ 1]) + right[41:])
            async with cluster.node("b:1") as b:
                await until(lambda: _is_complete(b))
            assert manifest.read_bytes() == right

    work(do)


def test_a_file_that_is_gone_for_one_node_ends_the_waiting_on_all(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    cluster = Cluster(tmp_path, etcd, *NAMES)
    cluster.write("d", {f"{i}.bin": 200_000 for i in range(12)})

    async def do() -> None:
        async with cluster.all() as nodes:
            await nodes[0].add("corpus", "d")
            gone = cluster.source / "d" / "7.bin"
            gone.unlink()
            await nodes[0].ask("want", target="corpus")
            for node in nodes:
                with pytest.raises(
                    (MissingFileError, ResourceError),
                    match=f"{gone}: was deleted at the source after it was listed",
                ):
                    await node.ask("wait", target="corpus")
            size = sum(node.source.num_bytes for node in nodes)
            assert size < 12 * 200_000

    work(do)


def test_a_want_of_some_nodes_and_copies(tmp_path: Path, etcd: EtcdServer) -> None:
    cluster = Cluster(tmp_path, etcd, *NAMES)
    size = cluster.write("d", {f"{i}.bin": 200_000 for i in range(30)})

    async def do() -> None:
        async with cluster.all() as (a, b, c):
            await a.add("corpus", "d")
            await a.ask("want", target="corpus", nodes=["b:1", "c:1"])
            found = await a.ask("wait", target="corpus")
            assert (found["nodes"], found["complete"]) == (2, 2)
            assert await _has_none(a)
            sizes = [node.source.num_bytes for node in (a, b, c)]
            assert sizes[0] == 0
            assert min(sizes[1:]) > 0
            assert size <= sum(sizes) < size + 100
            await a.ask("want", target="corpus", copies=2)
            await a.ask("wait", target="corpus")
            assert all([not await _has_none(node) for node in (a, b, c)])
            sizes = [(await node.ask("status"))["goals"][0]["bytes"] for node in (a, b, c)]
            pages = 30 * (-(-200_000 // 4096)) * 4096
            assert sum(sizes) == 2 * pages
            for about, message in (
                ({"nodes": ["b:1", "d:1"]}, r"'d:1' is not one of the 3 nodes: did you mean"),
                (
                    {"copies": 4},
                    r"corpus@latest: 4 copies cannot be kept on 3 nodes\nrequest fewer",
                ),
                ({"nodes": ["a:1"], "copies": 2}, "2 copies cannot be kept on 1 nodes"),
            ):
                with pytest.raises(ConfigError, match=message):
                    await a.ask("want", target="corpus", **about)

    work(do)


def test_removal_tells_what_each_node_deleted_and_one_that_is_away_deletes_when_it_is_back(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    cluster = Cluster(tmp_path, etcd, *NAMES)
    cluster.write("d", SIZES)
    cluster.write("e", {"x": 100_000})

    async def do() -> None:
        async with cluster.node("a:1") as a, cluster.node("b:1") as b:
            async with cluster.node("c:1"):
                await a.add("corpus", "d")
                await a.add("kept", "e")
                for name in ("corpus", "kept"):
                    await a.ask("want", target=name, whole=True)
                    await a.ask("wait", target=name)
            held = [await node.held() for node in (a, b)]
            done = await a.ask("remove", dataset="corpus")
            assert done["away"] == ["c:1"]
            left = [await node.held() for node in (a, b)]
            told = {name: each["bytes"] for name, each in done["nodes"].items()}
            assert told == {"a:1": held[0] - left[0], "b:1": held[1] - left[1]}
            assert {each["files"] for each in done["nodes"].values()} == {3}
            assert done["bytes"] == sum(told.values()) > 2 * 9 * MB
            assert await a.targets() == ["kept@latest"]
            async with cluster.node("c:1") as c:
                await until(lambda: _equals(c.held, left[0]))
                assert await c.targets() == ["kept@latest"]
                assert not await _knows(c, "corpus")
                assert len(list((c.folder / "manifests").iterdir())) == 1

    work(do)


async def _equals(get: Callable[[], Awaitable[object]], value: object) -> bool:
    return await get() == value


def test_unwanted_revisions_are_forgotten_on_all_nodes_when_the_latest_is_held(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    cluster = Cluster(tmp_path, etcd, "a:1", "b:1")
    cluster.write("d", SIZES)

    async def do() -> None:
        async with cluster.node("a:1") as a:
            async with cluster.node("b:1"):
                await a.add("corpus", "d")
                await a.ask("want", target="corpus", whole=True)
                await a.ask("wait", target="corpus")
                cluster.write("d", {"y.bin": 300_000}, seed=1)
            await a.add("corpus", "d")
            # The other node has not got it yet, and reads the earlier one when it is back
            assert (await a.ask("gc"))["revisions"] == []
            async with cluster.node("b:1") as b:
                await a.ask("wait", target="corpus")
                done = await b.ask("gc")
                assert len(done["revisions"]) == 1
                assert {each["files"] for each in done["nodes"].values()} == {1}
                assert len((await a.ask("list"))["revisions"]) == 1

    work(do)


@pytest.mark.parametrize("restored", [False, True])
def test_nothing_is_deleted_because_etcd_has_lost_its_data(
    tmp_path: Path, etcd: EtcdServer, restored: bool
) -> None:
    """All of them, or what was put, or put anew, after a copy of them was made."""
    cluster = Cluster(tmp_path, etcd, "a:1", "b:1")
    cluster.write("d", SIZES)
    cluster.write("e", {"x": 100_000})

    async def do() -> None:
        async with cluster.node("a:1") as a:
            async with cluster.node("b:1") as b:
                await a.add("first", "e")
                await until(lambda: _knows(b, "first"))
                await b.ask("want", target="first")
                etcd.stop()
                shutil.copytree(etcd.data, tmp_path / "backup")
                etcd.start()
                await b.ask("want", target="first", whole=True)
                await a.add("corpus", "d")
                await a.ask("want", target="corpus", whole=True)
                await until(lambda: _has_both(b))
                held = await b.held()
                etcd.stop()
                etcd.lose_data()
                if restored:
                    shutil.copytree(tmp_path / "backup", etcd.data)
                etcd.start()
                for node in (a, b):
                    # It has its lease anew, as members do
                    node.lease = await node.etcd.grant(60)
                await a.ask("want", target="corpus", whole=True)
                await a.ask("wait", target="corpus")
                for node in (a, b):
                    await until(node.is_as_etcd)
                    assert node.datasets.catalog.wants["first@latest"].is_whole
                    assert await node.held() == held
                    assert await node.targets() == ["corpus@latest", "first@latest"]
                cluster.names = NAMES
                async with cluster.node("c:1") as c:
                    await until(lambda: _equals(c.held, held))
                    assert await c.targets() == ["corpus@latest", "first@latest"]
            # What is removed afterwards is removed
            await a.ask("remove", dataset="corpus")
            async with cluster.node("b:1") as b:
                await until(lambda: _equals(b.targets, ["first@latest"]))
                assert await b.held() < held

    work(do)


def test_a_copy_that_cannot_be_written_agrees_when_it_can(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, etcd, "a:1", "b:1")
    cluster.write("d", SIZES)

    async def do() -> None:
        async with cluster.all() as (a, b):

            def fail(want: Want) -> None:
                raise DataError("/m/datasets.db", "cannot be used")

            shared = b.datasets.shared
            assert shared is not None
            with monkeypatch.context() as disk:
                disk.setattr(b.datasets.catalog, "put_want", fail)
                await a.add("corpus", "d")
                await a.ask("want", target="corpus")
                while shared.trouble != "/m/datasets.db: cannot be used":
                    await asyncio.sleep(0.05)
            await until(lambda: _equals(b.targets, ["corpus@latest"]))
            assert not shared.trouble

    work(do)


async def _has_both(node: LocalMates) -> bool:
    return len((await node.ask("status"))["goals"]) == 2 and await _is_complete(node)


def test_without_etcd_nodes_go_on_with_their_copies(tmp_path: Path, etcd: EtcdServer) -> None:
    cluster = Cluster(tmp_path, etcd, "a:1", "b:1")
    cluster.write("d", SIZES)
    cluster.write("e", {"x": 100_000})

    async def do() -> None:
        async with cluster.all() as (a, b):
            await a.add("corpus", "d")
            await a.ask("want", target="corpus", whole=True)
            await until(lambda: _is_complete(b))
        etcd.stop()
        (tmp_path / "b-1" / "files").rename(tmp_path / "lost")
        async with cluster.all() as (a, b):
            # A node that has started meanwhile, and has lost its files, fetches them
            await until(lambda: _is_complete(b))
            while a.etcd.away_since is None:
                await asyncio.sleep(0.05)
            status = await a.ask("status")
            assert "etcd is unreachable: " in status["trouble"]
            assert "wants" not in status
            assert [each["want"] for each in status["goals"]] == ["corpus@latest"]
            for verb, about in (
                ("want", {"target": "corpus", "whole": True}),
                ("unwant", {"target": "corpus"}),
                ("add", {"dataset": "more", "sources": [f"{cluster.source}/e/"]}),
                ("remove", {"dataset": "corpus"}),
            ):
                with pytest.raises(ResourceError, match="etcd is unreachable: "):
                    await a.ask(verb, **about)
            assert await a.targets() == ["corpus@latest"]
            etcd.start()
            while a.etcd.away_since is not None:
                await asyncio.sleep(0.05)
            await a.add("more", "e")
            await until(lambda: _knows(b, "more"))

    work(do)


def test_other_data_below_the_prefix_are_refused(tmp_path: Path, etcd: EtcdServer) -> None:
    cluster = Cluster(tmp_path, etcd, "a:1")
    cluster.write("d", SIZES)

    async def do() -> None:
        client = Etcd([etcd.url])
        key = f"{PREFIX}shared/wants/corpus@latest"
        await client.change({}, {key: b"something else"})
        async with cluster.node("a:1") as a:
            message = f"etcd: {key}: found b'something else', expected the JSON of a megablend catalog\nset `mirror.etcd.prefix`"
            while message not in (await a.ask("status"))["trouble"]:
                await asyncio.sleep(0.05)
            with pytest.raises(ConfigError, match=re.escape(message)):
                await a.add("corpus", "d")
            await client.change({}, {}, [key])
            while (await a.ask("status"))["trouble"]:
                await asyncio.sleep(0.05)
            await a.add("corpus", "d")
        await client.close()

    work(do)


def test_a_command_hears_what_was_said_on_another_node_before(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, etcd, "a:1", "b:1")
    cluster.write("d", SIZES)

    async def do() -> None:
        async with cluster.all() as (a, b):
            shared = b.datasets.shared
            assert shared is not None
            take = shared._sync

            async def take_late(*news: Any) -> None:
                await asyncio.sleep(0.5)
                await take(*news)

            monkeypatch.setattr(shared, "_sync", take_late)
            await a.add("corpus", "d")
            await b.ask("want", target="corpus")
            assert await b.targets()

    work(do)


def test_a_want_ends_at_its_time(tmp_path: Path, etcd: EtcdServer) -> None:
    cluster = Cluster(tmp_path, etcd, "a:1", "b:1")
    cluster.write("d", SIZES)

    async def do() -> None:
        async with cluster.all() as (a, b):
            await a.add("corpus", "d")
            await until(lambda: _knows(b, "corpus"))
            await b.ask("want", target="corpus", until=time.time() + 3)
            await b.ask("wait", target="corpus")
            for node in (a, b):
                node.datasets.holding.change()
                while await node.targets():
                    node.datasets.holding.change()
                    await asyncio.sleep(0.1)
            await a.add("corpus", "d")  # a change, after which the key is deleted
            await until(lambda: _is_empty(a.etcd))

    work(do)


async def _is_empty(etcd: Etcd) -> bool:
    return not (await etcd.get(f"{PREFIX}shared/wants/"))[0]
