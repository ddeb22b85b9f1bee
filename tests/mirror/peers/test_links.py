"""Links that are late, silent, cut or wrong: reads go on, and their bytes are right."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import pytest

from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import NO_PAGES, Pages, count_bytes, subtract, unite
from megablend.mirror.disk.room import Need
from megablend.mirror.members.launchers import Pace
from megablend.mirror.node.engine import AwayError
from megablend.mirror.peers.peer import Peer
from tests.cases import others_slow
from tests.mirror.peers.clusters import PATIENT, NodesOf, until
from tests.mirror.peers.test_cluster import is_read_once, make_files
from tests.storage.faulty import Faults, FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
SLOW = Pace(ping=0.2, silent=10.0, gone=60.0, complete=60.0)
"""Longer than a busy machine takes for what has nothing to do with links."""


def peer_of(nodes: NodesOf, i: int, other: int) -> Peer:
    """Another node, as one sees it."""
    return nodes.cluster(i)._peers[nodes.names[other]]


def size_of(source: FaultySource) -> int:
    return sum(map(len, source.files.values()))


def make_small(count: int, size: int = 1 << 20) -> dict[str, bytes]:
    """Files of one piece each."""
    return {f"d/{i}": random.Random(i).randbytes(size) for i in range(count)}


async def names_by_home(nodes: NodesOf) -> dict[int, list[str]]:
    """Files of one piece, by the node that is its home."""
    placement = nodes.assembly(next(iter(nodes.nodes))).placement
    found: dict[int, list[str]] = {i: [] for i in range(len(nodes.names))}
    for name in nodes.source.files:
        (home,) = placement.order(await nodes.key(name), 0, 1)
        found[nodes.names.index(home)].append(name)
    return found


def is_settled_at(source: FaultySource, before: int) -> bool:
    """Whether nothing has left the source since but a byte for each version that was asked for."""
    return source.bytes - before <= 16 * len(source.files)


def test_a_node_that_answers_late_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, SLOW, has_links=True) as nodes:
            nodes.links[1].delay = 2.0
            await nodes.start(0, 1, 2)
            await nodes.read_all()
            assert is_read_once(source, 8)
            assert "is unreachable" not in caplog.text

    with FaultySource(make_files(2, 6 << 20)) as source:
        asyncio.run(run())


def test_who_waits_for_a_node_that_leaves_is_told(tmp_path: Path) -> None:
    """A view without it closes its connection while a request has no answer yet."""

    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, SLOW, has_links=True) as nodes:
            await nodes.start(0, 1)
            await nodes.meet()
            peer = peer_of(nodes, 0, 1)
            nodes.links[1].silent_for = None
            waiting = asyncio.ensure_future(peer.post("/v1/check", b"{}"))
            await asyncio.sleep(0.1)
            peer.close()
            with pytest.raises(AwayError, match="it is no longer one of the nodes"):
                await asyncio.wait_for(waiting, 60.0)

    with FaultySource(make_files(1, 1 << 20)) as source:
        asyncio.run(run())


def test_a_node_that_has_left_is_pinged_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the ping under way loses its cancellation, as `asyncio.wait_for` may."""

    async def run() -> None:
        is_pinged = asyncio.Event()

        async def ping() -> bool:
            is_pinged.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return True

        async with NodesOf(tmp_path, source, 2, SLOW, has_links=True) as nodes:
            await nodes.start(0, 1)
            await nodes.meet()
            peer = peer_of(nodes, 0, 1)
            monkeypatch.setattr(peer, "ping", ping)
            nodes.links[1].silent_for = None
            waiting = asyncio.ensure_future(peer.post("/v1/check", b"{}"))
            await is_pinged.wait()
            watcher = peer._watcher
            assert watcher is not None
            peer.close()
            await asyncio.wait([watcher], timeout=60)
            assert watcher.done()
            with pytest.raises(AwayError):
                await waiting

    with FaultySource(make_files(1, 1 << 20)) as source:
        asyncio.run(run())


def test_a_silent_link_holds_up_the_first_reads_only(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, SLOW, has_links=True) as nodes:
            await nodes.start(0, 1, 2)
            # All have met, and talk by connections that stay open
            await until(lambda: nodes.cluster(0).as_json()["formed"])
            names = (await names_by_home(nodes))[1]
            first = names[:2]
            second = names[2:-1]
            later = names[-1:]
            assert first
            assert second
            await nodes.read(0, first[0])
            await nodes.read(2, first[0])
            nodes.links[1].silent_for = None
            begin = time.monotonic()
            await nodes.read_all(0, 2, names=first)
            assert SLOW.silent < time.monotonic() - begin < 5 * SLOW.silent
            assert peer_of(nodes, 0, 1).away_since is not None
            begin = time.monotonic()
            await nodes.read_all(0, 2, names=second)
            assert time.monotonic() - begin < SLOW.silent
            # Nodes 0 and 2 have read once between them, node 1 nothing of these
            nodes.links[1].silent_for = set()
            await until(lambda: all(peer_of(nodes, i, 1).away_since is None for i in (0, 2)))
            await nodes.read_all(0, 2, names=later)
            # It was asked again
            assert len(nodes.nodes[1].engine.store.held(await nodes.key(later[0])).blocks)
            await nodes.settle()
            await nodes.read_all()
            # Requests of `first` may have arrived late, and been answered for nobody
            once = size_of(source)
            assert source.bytes - once <= sum(len(source.files[name]) for name in first) + (1 << 18)

    # So many that each node is the home of several
    with FaultySource(make_small(60, 400_000)) as source:
        asyncio.run(run())


@pytest.mark.parametrize(
    "sides",
    [((0, 1), (2, 3, 4)), pytest.param(((0, 1, 2), (3, 4, 5, 6, 7)), marks=pytest.mark.slow)],
    ids=["2 of 5", "3 of 8"],
)
def test_both_sides_of_a_partition_read_on(
    sides: tuple[tuple[int, ...], tuple[int, ...]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    count = sum(map(len, sides))

    async def run() -> None:
        async with NodesOf(tmp_path, source, count, SLOW, has_links=True, copies=2) as nodes:
            await nodes.start(*range(count))
            await nodes.read_all(names=["d/0"])
            await nodes.settle()
            for side, other in (sides, sides[::-1]):
                for i in side:
                    nodes.links[i].silent_for = {nodes.names[j] for j in other}
            begin = time.monotonic()
            await nodes.read_all(names=["d/1", "d/2"])
            assert time.monotonic() - begin < SLOW.gone
            # Once on each side
            once = size_of(source)
            assert once < source.bytes < 2 * once
            for side, other in (sides, sides[::-1]):
                for i in side:
                    away = nodes.cluster(i).as_json()["away_nodes"]
                    assert away
                    assert set(away) <= {nodes.names[j] for j in other}
            assert "is unreachable: it has not responded for 10 s" in caplog.text
            for link in nodes.links:
                link.silent_for = set()
            await nodes.settle()
            assert not any(nodes.cluster(i).as_json()["away"] for i in range(count))
            before = source.bytes
            await nodes.read_all()
            assert is_settled_at(source, before)
            assert "responds again after" in caplog.text

    with FaultySource({f"d/{i}": random.Random(i).randbytes(9 << 20) for i in range(3)}) as source:
        asyncio.run(run())


def test_a_flipped_bit_is_never_stored(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT, has_links=True, copies=2) as nodes:
            await nodes.start(0, 1, 2)
            for link in nodes.links:
                link.flips = 1000
            await nodes.read_all()
            assert sum(link.flips for link in nodes.links) < 3000
            for link in nodes.links:
                link.flips = 0
            await nodes.read_all()
            await nodes.settle()
            before = source.bytes
            for i in range(3):
                scrubbed = await nodes.nodes[i]._scrub_all()
                assert scrubbed["wrong"] == []
            await nodes.read_all()
            assert is_settled_at(source, before)

    with FaultySource(make_files(3, 6 << 20)) as source:
        asyncio.run(run())


def lost_with(nodes: NodesOf, dead: int, key: FileKey) -> int:
    """Bytes of a file that may be read again: what the dead node has, or waits for, and another one
    neither has nor knows from a third one, though it may be asked for them."""
    engine = nodes.nodes[dead].engine
    had = engine.store.held(key)
    for flights in engine._flights.values():
        for flight in flights:
            if flight.want.key == key:
                had = unite(had, flight.want.pages)
    lost = had
    unknown = NO_PAGES
    for i, node in nodes.nodes.items():
        if i != dead:
            held = node.engine.store.held(key)
            lost = subtract(lost, held)
            unknown = unite(unknown, subtract(unknown_to(nodes, i, dead, key, had), held))
    return count_bytes(unite(lost, unknown), key.size)


def unknown_to(nodes: NodesOf, i: int, dead: int, key: FileKey, pages: Pages) -> Pages:
    """Those of the pages that a node is told of by whoever gets them, but knows only from the dead
    one: copies are announced a moment after they have come."""
    assembly = nodes.assembly(i)
    own = nodes.names[i]
    count = assembly.placement.copies + 1
    told = NO_PAGES
    for need in assembly.placement.divide([Need.of(key, pages)], [own], count)[own]:
        told = need.pages
    for name, known in assembly.holders._announced.get(key, {}).items():
        if name != nodes.names[dead]:
            told = subtract(told, known)
    return told


@pytest.mark.parametrize("seed", others_slow(range(4), quick=range(2)))
def test_nodes_that_are_killed_while_others_wait_for_them(seed: int, tmp_path: Path) -> None:
    """What is read again is at most what was on its way, and what only the dead one was known to hold."""

    async def run() -> None:
        rng = random.Random(seed)
        async with NodesOf(tmp_path, source, 4, PATIENT, has_links=True, copies=2) as nodes:
            await nodes.start(*range(4))
            lost = 0
            for name in sorted(source.files):
                dead = rng.randrange(4)
                others = [i for i in range(4) if i != dead]
                key = await nodes.key(name)
                enough = source.bytes + rng.randrange(9 << 20)
                reading = asyncio.ensure_future(nodes.read_all(*others, names=[name]))
                await until(lambda: source.bytes > enough)  # noqa: B023
                lost += lost_with(nodes, dead, key)
                await nodes.stop(dead, empties=rng.random() < 0.5)
                await reading
                await nodes.start(dead)
                await nodes.read_all(dead, names=[name])
                await nodes.settle()
            once = size_of(source)
            assert source.bytes <= once + lost + 100 * len(source.files)
            before = source.bytes
            await nodes.read_all()
            assert is_settled_at(source, before)

    files = {f"d/{i}": random.Random(i).randbytes(12 << 20) for i in range(4)}
    with FaultySource(files, Faults(latency=0.02)) as source:
        asyncio.run(run())
