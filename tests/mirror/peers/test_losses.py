"""Nodes that are away, full, forbidden, damaged or new: others get what they need, once where that can be."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from megablend.errors import DataError
from megablend.mirror import node_parts
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import count_bytes, pages_of_file
from megablend.mirror.disk.room import Need
from megablend.mirror.node.engine import AwayError, Mode, Want
from megablend.mirror.peers import copies
from tests.mirror.peers.clusters import PATIENT, NodesOf, until
from tests.mirror.peers.test_cluster import is_read_once
from tests.mirror.peers.test_links import is_settled_at, make_small, names_by_home
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")


def held_bytes(nodes: NodesOf, i: int, key: FileKey) -> int:
    return count_bytes(nodes.nodes[i].engine.store.held(key), key.size)


def formed(nodes: NodesOf, i: int = 0) -> bool:
    return bool(nodes.cluster(i).as_json()["formed"])


def test_what_is_due_later_waits_for_a_node_that_is_away_until_it_is_gone(tmp_path: Path) -> None:
    async def run() -> None:
        pace = PATIENT._replace(gone=15.0)
        async with NodesOf(tmp_path, source, 3, pace) as nodes:
            await nodes.start(0, 1, 2)
            await until(lambda: formed(nodes))
            by_home = await names_by_home(nodes)
            its = [await nodes.key(name) for name in by_home[1]]
            others = [await nodes.key(name) for name in by_home[0] + by_home[2]]
            assert its
            assert others
            await nodes.stop(1)
            far = time.monotonic() + 1000
            want = Want(its[0], pages_of_file(its[0].size), far)
            with pytest.raises(AwayError, match=f"{nodes.names[1]} is unreachable"):
                await nodes.nodes[0].engine.obtain(want)
            away_at = time.monotonic()
            # What waits holds up nothing that is due after it
            needs = [
                Need.of(key, pages_of_file(key.size), far + i)
                for i, key in enumerate([*its, *others])
            ]
            nodes.nodes[0].needs.set("client", needs)
            await until(lambda: all(held_bytes(nodes, 0, key) == key.size for key in others))
            assert not any(held_bytes(nodes, 0, key) for key in its)
            assert time.monotonic() - away_at < pace.gone
            await until(lambda: all(held_bytes(nodes, 0, key) == key.size for key in its))
            assert time.monotonic() - away_at > pace.gone - 1
            assert is_read_once(source, 8)

    with FaultySource(make_small(40, 100_000)) as source:
        asyncio.run(run())


def test_a_node_that_comes_back_is_asked_for_what_waited(tmp_path: Path) -> None:
    async def run() -> None:
        pace = PATIENT._replace(gone=60.0)
        async with NodesOf(tmp_path, source, 3, pace) as nodes:
            await nodes.start(0, 1, 2)
            await until(lambda: formed(nodes))
            by_home = await names_by_home(nodes)
            its = [await nodes.key(name) for name in by_home[1]]
            await nodes.read_all(1, names=by_home[1])
            before = source.bytes
            await nodes.stop(1)
            far = time.monotonic() + 1000
            nodes.nodes[0].needs.set(
                "client", [Need.of(key, pages_of_file(key.size), far) for key in its]
            )
            await until(lambda: nodes.cluster(0).as_json()["away"] == 1)
            await nodes.start(1)
            await until(lambda: all(held_bytes(nodes, 0, key) == key.size for key in its))
            assert is_settled_at(source, before)

    with FaultySource(make_small(40, 100_000)) as source:
        asyncio.run(run())


def test_a_home_that_may_not_fetch_gets_a_copy_from_who_asked(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            nodes.settings_of[1] = {"prefixes": ["https://elsewhere.example/"]}
            await nodes.start(0, 1, 2)
            await until(lambda: formed(nodes))
            names = (await names_by_home(nodes))[1]
            assert names
            await nodes.read_all(0, names=names)
            keys = [await nodes.key(name) for name in names]
            await until(lambda: all(held_bytes(nodes, 1, key) == key.size for key in keys))
            assert not nodes.nodes[1].source.num_bytes
            await nodes.read_all(2, names=names)
            assert sum(node.source.num_bytes for node in nodes.nodes.values()) == sum(
                len(source.files[name]) for name in names
            )

    with FaultySource(make_small(40, 100_000)) as source:
        asyncio.run(run())


class SignedSource(FaultySource):
    """Answers URLs with a signature only."""

    status = 403

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str]
    ) -> bool:
        if "signature=" not in urlsplit(target).query:
            return await self._send(writer, method, self.status, {}, b"")
        return await super()._answer(writer, method, target, headers)


@pytest.mark.parametrize("status", [403, 401, 404])
def test_a_signature_that_one_node_alone_knows(status: int, tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            await nodes.start(0, 1, 2)
            await until(lambda: formed(nodes))
            signed = {f"{source.url}/{name}": "signature=1" for name in source.files}
            nodes.nodes[0].source.add_queries(signed)
            names = (await names_by_home(nodes))[1]
            assert names
            begin = time.monotonic()
            await nodes.read_all(0, names=names)
            assert time.monotonic() - begin < 50
            keys = [await nodes.key(name) for name in names]
            await until(lambda: all(held_bytes(nodes, 1, key) == key.size for key in keys))
            before = source.bytes
            await nodes.read_all(2, names=names)
            assert is_settled_at(source, before)

    unsigned = SignedSource(make_small(40, 100_000))
    unsigned.status = status
    with unsigned as source:
        asyncio.run(run())


def test_a_home_without_room_refuses_and_nothing_loops(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT, has_links=True) as nodes:
            nodes.settings_of[1] = {"size": 100_000}
            await nodes.start(0, 1, 2)
            await until(lambda: formed(nodes))
            names = (await names_by_home(nodes))[1]
            assert names
            await nodes.read_all(0, 2, names=names)
            await nodes.settle()
            # Each of the two has read them by itself, at most
            before = source.bytes
            assert before <= 2 * sum(len(source.files[name]) for name in names) + 1000
            requests = source.requests
            num_connections = nodes.links[1].num_connections
            await asyncio.sleep(2)
            assert (source.bytes, source.requests) == (before, requests)
            assert nodes.links[1].num_connections - num_connections < 8
            await nodes.read_all(0, 2, names=names)
            assert is_settled_at(source, before)

    with FaultySource(make_small(40, 300_000)) as source:
        asyncio.run(run())


def flip_on_disk(nodes: NodesOf, i: int, key: FileKey) -> None:
    """A byte of each 64 KiB is another one."""
    path = nodes.nodes[i].engine.store.folder.data_path(key.digest)
    path.chmod(0o640)
    with path.open("r+b") as file:
        for at in range(0, key.size, 1 << 16):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("copies", [1, 2])
def test_bytes_that_a_disk_has_changed_are_got_elsewhere(copies: int, tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 4, PATIENT, copies=copies) as nodes:
            await nodes.start(0, 1, 2, 3)
            await until(lambda: formed(nodes))
            placement = nodes.assembly(0).placement
            for name in source.files:
                key = await nodes.key(name)
                order = [nodes.names.index(each) for each in placement.order(key, 0, 4)]
                asker = order[-1]
                await nodes.read(order[2], name)
                await nodes.settle()
                before = source.bytes
                # The home's own bytes: it does not send what is damaged
                flip_on_disk(nodes, order[0], key)
                await nodes.read(asker, name)
                await nodes.settle()
                # This node's own, which a rank has found to be wrong
                flip_on_disk(nodes, asker, key)
                want = Want(key, pages_of_file(key.size), time.monotonic(), Mode.FRESH)
                await nodes.nodes[asker].engine.obtain(want)
                await nodes.read(asker, name)
                await nodes.settle()
                await nodes.read_all(names=[name])
                # Others have it as it was; a home without copies may ask the source before them
                assert source.bytes - before <= (100 if copies > 1 else 2 * key.size + 100)

    with FaultySource(make_small(6)) as source:
        asyncio.run(run())


@pytest.mark.parametrize("empties", [False, True])
def test_a_node_that_starts_again_during_reads_costs_nothing_that_has_copies(
    empties: bool, tmp_path: Path
) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 4, PATIENT, has_links=True, copies=2) as nodes:
            await nodes.start(0, 1, 2, 3)
            names = sorted(source.files)
            await asyncio.gather(*(nodes.read(i % 4, name) for i, name in enumerate(names)))
            await nodes.settle()
            assert is_read_once(source, 8)
            before = source.bytes
            reading = asyncio.ensure_future(nodes.read_all(0, 1, 2))
            for _ in range(3):
                await nodes.stop(3, empties=empties)
                await nodes.start(3)
                await asyncio.sleep(0.3)
            await reading
            await nodes.read_all(3)
            await nodes.settle()
            assert is_settled_at(source, before)

    with FaultySource(make_small(30)) as source:
        asyncio.run(run())


def test_a_clock_that_is_set_back_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time

    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT, copies=2) as nodes:
            await nodes.start(0, 1, 2)
            names = sorted(source.files)
            await nodes.read_all(names=names[:4])
            monkeypatch.setattr(time, "time", lambda: real() - 86400)
            await nodes.read_all(names=names[4:8])
            await nodes.settle()
            await nodes.stop(1)
            await nodes.start(1)
            await nodes.meet()
            monkeypatch.setattr(time, "time", lambda: real() + 86400)
            await nodes.stop(2, empties=True)
            await nodes.start(2)
            await nodes.meet()
            await nodes.read_all()
            await nodes.settle()
            assert is_read_once(source, 20)

    with FaultySource(make_small(40, 100_000)) as source:
        asyncio.run(run())


def test_a_node_goes_on_while_nothing_can_be_written_to_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_parts, "_WATCH_SECONDS", 0.01)

    async def run() -> None:
        async with NodesOf(tmp_path, source, 2) as nodes:
            await nodes.start(0, 1)
            await nodes.read_all()
            store = nodes.nodes[0].engine.store
            failures = list[int]()

            def fail() -> None:
                failures.append(1)
                raise DataError("/m/mirror.db", "cannot be used (a readonly database)")

            monkeypatch.setattr(store, "evict_to_reserve", fail)
            await until(lambda: len(failures) > 2)
            await nodes.read_all()
            assert is_read_once(source, 4)
            assert caplog.text.count("mirror.db: cannot be used") == 1

    with FaultySource(make_small(4)) as source:
        asyncio.run(run())


def test_copies_that_a_disk_did_not_take_are_made_when_it_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_RETRY_SECONDS", 0.2)

    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, PATIENT, copies=2) as nodes:
            await nodes.start(0, 1)
            await nodes.meet()
            store = nodes.nodes[1].engine.store
            failures = list[int]()

            def fail(*_: object) -> bool:
                failures.append(1)
                raise DataError("/m", "cannot be written (a read-only file system)")

            with monkeypatch.context() as broken:
                broken.setattr(store, "make_room", fail)
                await nodes.read_all(0)
                await until(lambda: len(failures) > 2 * len(source.files))
            keys = [await nodes.key(name) for name in source.files]
            await until(lambda: all(held_bytes(nodes, 1, key) == key.size for key in keys))
            await nodes.settle()
            assert is_read_once(source, 4)

    with FaultySource(make_small(4)) as source:
        asyncio.run(run())
