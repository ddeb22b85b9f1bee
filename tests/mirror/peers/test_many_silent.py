"""Many nodes that are away at once are waited for once, and hold up nothing else."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import Pages, pages_of_file
from megablend.mirror.disk.room import Need
from megablend.mirror.members.launchers import Pace
from megablend.mirror.node.engine import Want
from tests.mirror.peers.clusters import PATIENT, NodesOf, until
from tests.storage.faulty import FaultySource

pytestmark = pytest.mark.usefixtures("obstore")
PAGE = Pages(np.array([0], np.uint32), np.array([1], np.uint64))


async def add_file(nodes: NodesOf, i: int, place: int) -> str:
    """A new file of the source in whose order a node has this place."""
    placement = nodes.assembly(i).placement
    for number in range(1000):
        name = f"d/{place}-{number}"
        data = number.to_bytes(2, "little") * 50_000
        nodes.source.files[name] = data
        key = await nodes.key(name)
        if placement.order(key, 0, len(nodes.names))[place] == nodes.names[i]:
            return name
        del nodes.source.files[name]
    raise AssertionError("no such file")


def test_many_silent_nodes_are_not_waited_for_one_after_another(tmp_path: Path) -> None:
    async def run() -> None:
        pace = Pace(ping=0.4, silent=10.0, gone=60.0, complete=60.0)
        async with NodesOf(tmp_path, source, 5, pace, has_links=True) as nodes:
            await nodes.start(*range(5))
            await nodes.read_all(names=["d/0"])
            name = await add_file(nodes, 0, 4)
            for link in nodes.links[1:]:
                link.silent_for = None
            begin = time.monotonic()
            await nodes.read(0, name, PAGE)
            assert time.monotonic() - begin < 3 * (pace.ping + pace.silent)
            assert nodes.cluster(0).as_json()["away"] == 4

    with FaultySource({"d/0": b"\7" * (1 << 20)}) as source:
        asyncio.run(run())


def test_a_late_node_makes_nobody_be_called_away(tmp_path: Path) -> None:
    async def run() -> None:
        pace = Pace(ping=0.2, silent=10.0, gone=30.0, complete=60.0)
        async with NodesOf(tmp_path, source, 3, pace, has_links=True) as nodes:
            await nodes.start(0, 1, 2)
            await nodes.settle()
            name = await add_file(nodes, 0, 2)
            for link in nodes.links[1:]:
                link.delay = 1.0
            before = source.bytes
            await nodes.read(0, name, PAGE)
            assert source.bytes <= before + 4096 + 50
            assert not nodes.cluster(0).as_json()["away"]

    with FaultySource({"d/0": b"\7" * (1 << 20)}) as source:
        asyncio.run(run())


def test_copies_of_a_dead_holder_hold_up_no_others(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT, copies=3) as nodes:
            await nodes.start(0, 1, 2)
            await nodes.read(0, "d/0")
            await nodes.settle()
            assembly = nodes.assembly(0)
            await nodes.stop(1)
            # What only the second one held when it ended
            for i in range(300):
                key = FileKey(f"{source.url}/d/none{i}", "e", 5000)
                need = Need.of(key, pages_of_file(5000), 0.0)
                assembly.holders.note(nodes.names[1], [need])
                await assembly.copies.note_announced([need])
            await nodes.read(2, "d/1")
            key = await nodes.key("d/1")
            every = pages_of_file(key.size)

            async def is_held() -> bool:
                held, _ = await nodes.nodes[0].engine.read_held(Want(key, every))
                return len(held.blocks) == len(every.blocks)

            begin = time.monotonic()
            while not await is_held():
                assert time.monotonic() < begin + 100
                await asyncio.sleep(0.05)
            # They are tried again when it is there
            assert assembly.count_debts()["bytes_to_copy"] > 0
            await nodes.start(1)

            def has_tried() -> bool:
                debts = assembly.count_debts()
                return not debts["bytes_to_copy"] and not debts["copying"]

            await until(has_tried)
            # What nobody has is forgotten
            assert {key.location for key in assembly.holders._announced} <= {
                f"{source.url}/{name}" for name in source.files
            }

    with FaultySource({f"d/{i}": bytes([i]) * (3 << 20) for i in range(2)}) as source:
        asyncio.run(run())
