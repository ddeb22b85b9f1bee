"""Nodes that read through one another: each byte leaves the source once, whatever ends."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from megablend.mirror.disk.pages import pages_of_file
from megablend.mirror.disk.room import Need
from megablend.mirror.node.frames import batch_needs
from tests.cases import others_slow
from tests.mirror.peers.clusters import PATIENT, NodesOf, until
from tests.storage.faulty import Faults, FaultySource

pytestmark = pytest.mark.usefixtures("obstore")


def make_files(count: int = 4, most: int = 20 << 20, seed: int = 0) -> dict[str, bytes]:
    rng = random.Random(seed)
    sizes = [rng.randrange(1, most) for _ in range(count)]
    return {f"d/{i}": rng.randbytes(size) for i, size in enumerate([*sizes, 30_000, 70_000])}


def is_read_once(source: FaultySource, num_nodes: int) -> bool:
    """Whether each byte of the files has left the source once. To know a file's version a node may
    ask for a byte of it, for each view."""
    size = sum(map(len, source.files.values()))
    return size <= source.bytes <= size + 4 * num_nodes * len(source.files)


@pytest.mark.parametrize("count", [2, 4])
def test_all_nodes_read_all_and_each_byte_leaves_the_source_once(
    count: int, tmp_path: Path
) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, count, PATIENT) as nodes:
            await nodes.start(*range(count))
            await nodes.read_all()
            assert is_read_once(source, 8)
            await nodes.read_all()
            assert is_read_once(source, 8)

    with FaultySource(make_files()) as source:
        asyncio.run(run())


def test_answers_that_are_late_are_not_asked_for_twice(tmp_path: Path) -> None:
    """As reads past a mirror do (`hedges`)."""

    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, PATIENT) as nodes:
            await nodes.start(0, 1)
            for name in source.files:
                await nodes.read(0, name)
            assert is_read_once(source, 2)

    files = {f"d/{i}": random.Random(i).randbytes(70_000) for i in range(250)}
    with FaultySource(files, Faults(latency=0.004, tail=0.006)) as source:
        asyncio.run(run())


def test_nothing_is_fetched_before_all_have_come(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            await nodes.start(0, 1)
            reading = asyncio.ensure_future(nodes.read_all(0, 1))
            await asyncio.sleep(1.5)
            assert source.bytes < 50  # versions were asked for
            await nodes.start(2)
            await reading
            await nodes.read_all(2)
            assert is_read_once(source, 8)

    with FaultySource(make_files(2)) as source:
        asyncio.run(run())


@pytest.mark.parametrize("dead", others_slow(range(4), quick=[1]))
def test_a_node_that_ends_costs_nothing_when_its_copies_are_paid(dead: int, tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 4, PATIENT, copies=2) as nodes:
            await nodes.start(0, 1, 2, 3)
            names = sorted(source.files)
            await asyncio.gather(*(nodes.read(i % 4, name) for i, name in enumerate(names)))
            await nodes.settle()
            assert is_read_once(source, 8)
            await nodes.stop(dead, empties=True)
            await nodes.read_all()
            assert is_read_once(source, 8)
            # An empty machine in its place
            await nodes.start(dead)
            await nodes.read_all(dead)
            await nodes.settle()
            assert is_read_once(source, 8)

    with FaultySource(make_files(6)) as source:
        asyncio.run(run())


def test_other_lists_of_nodes_keep_what_is_held(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 8, PATIENT, copies=3) as nodes:
            everyone = list(range(8))
            await nodes.start(*everyone)
            names = sorted(source.files)
            await asyncio.gather(*(nodes.read(i % 8, name) for i, name in enumerate(names)))
            await nodes.settle()
            for i in everyone:
                await nodes.stop(i, empties=i in (2, 5))
            fewer = [0, 1, 3, 4, 6, 7]
            await nodes.start(*fewer, members=fewer)
            await nodes.read_all(0, 4)
            await nodes.settle()
            for i in fewer:
                await nodes.stop(i)
            await nodes.start(*everyone)
            await nodes.read_all(2, 5, 7)
            assert is_read_once(source, 8)

    with FaultySource(make_files(6, 9 << 20)) as source:
        asyncio.run(run())


@pytest.mark.parametrize("batch", [1 << 19, 600])
def test_needs_of_before_the_nodes_met_are_told(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_needs, "__defaults__", (batch,))

    async def run() -> None:
        async with NodesOf(tmp_path, source, 2) as nodes:
            await nodes.start(0)
            key = await nodes.key("d/0")
            pages = pages_of_file(key.size)
            nodes.nodes[0].needs.set("client", [Need.of(key, pages, time.monotonic() + 1e5)])
            await asyncio.sleep(0.5)
            await nodes.start(1)
            held = nodes.nodes[1].needs
            (own,) = await nodes.cluster(1).select([Need.of(key, pages, 0.0)])
            kept: list[int] = []

            def is_told() -> bool:
                needs = held._of_nodes.get(nodes.names[0], [])
                kept[:] = [block for need in needs for block in need.pages.blocks.tolist()]
                return len(kept) >= len(own.pages.blocks)

            await until(is_told)
            assert kept == own.pages.blocks.tolist()

    # So many pieces that each node is the home of some, whatever its port
    with FaultySource({"d/0": bytes(120 << 20)}) as source:
        asyncio.run(run())


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost"])
def test_nodes_listen_at_the_loopback_address_of_their_names(host: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, PATIENT) as nodes:
            nodes.names = [f"{host}:{port}" for port in nodes.ports]
            await nodes.start(0, 1)
            await nodes.read_all()
            assert is_read_once(source, 2)

    with FaultySource(make_files(1)) as source:
        asyncio.run(run())
