"""Nodes that come and go while others run: views are handed to them, one after another."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from pathlib import Path

import pytest

from megablend.mirror.disk.pages import pages_of_file
from megablend.mirror.disk.room import Need
from megablend.mirror.node.engine import AwayError, Want
from megablend.mirror.peers.peer import Ask, OtherViewError
from tests.mirror.peers.clusters import PATIENT, HandedViews, NodesOf, until
from tests.mirror.peers.test_cluster import is_read_once, make_files
from tests.storage.faulty import Faults, FaultySource

pytestmark = pytest.mark.usefixtures("obstore")


def is_in(nodes: NodesOf, number: int, *which: int) -> bool:
    """Whether a view is in force at these nodes."""
    states = [nodes.cluster(i).as_json() for i in which or nodes.nodes]
    return all(each["formed"] and each["view"] == number for each in states)


def is_more_read(source: FaultySource, least: int) -> bool:
    return source.bytes >= least


def test_an_empty_node_that_comes_gets_its_share_from_the_others(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 4, PATIENT) as nodes:
            views = HandedViews(3)
            await nodes.start(0, 1, 2, views=views)
            views.hand(nodes, 1, range(3), range(3))
            await nodes.read_all()
            reading = asyncio.ensure_future(nodes.read_all(0, 1, 2))
            await nodes.start(3, views=views)
            views.hand(nodes, 2, range(4), range(4))
            await until(lambda: is_in(nodes, 2))
            await reading
            await nodes.settle()
            num_blocks = 0
            for name in source.files:
                key = await nodes.key(name)
                every = Need.of(key, pages_of_file(key.size), 0.0)
                for own in await nodes.cluster(3).select([every]):
                    held, _ = await nodes.nodes[3].engine.read_held(Want(key, own.pages))
                    assert len(held.blocks) == len(own.pages.blocks)
                    num_blocks += len(held.blocks)
            assert num_blocks > 0
            await nodes.read_all()
            assert is_read_once(source, 12)

    # So many that it is the home of some
    many = {f"d/small{i}": bytes([i]) * 3000 for i in range(60)}
    with FaultySource(make_files() | many) as source:
        asyncio.run(run())


def test_the_earlier_view_is_in_force_until_all_have_met_in_the_new_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            views = HandedViews(2)
            await nodes.start(0, 1, views=views)
            views.hand(nodes, 1, range(2), range(2))
            await nodes.read(0, "d/0")
            views.hand(nodes, 2, range(3), range(2))
            await asyncio.sleep(1.0)
            assert is_in(nodes, 1)
            await nodes.read_all()
            await nodes.start(2, views=views)
            views.hand(nodes, 2, range(3), [2])
            await until(lambda: is_in(nodes, 2))
            await nodes.read_all()
            assert is_read_once(source, 8)

    with FaultySource(make_files()) as source:
        asyncio.run(run())


def test_a_view_without_a_dead_node_makes_its_copies_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with NodesOf(tmp_path, source, 8, PATIENT, copies=3) as nodes:
            views = HandedViews(8)
            everyone = set(range(8))
            await nodes.start(*everyone, views=views)
            views.hand(nodes, 1, everyone, everyone)
            names = sorted(source.files)
            await asyncio.gather(*(nodes.read(i % 8, name) for i, name in enumerate(names)))
            await nodes.settle()
            fewer = everyone - {2, 5}
            for i in (2, 5):
                await nodes.stop(i, empties=True)
            views.hand(nodes, 2, fewer, fewer)
            await until(lambda: is_in(nodes, 2))
            await nodes.settle()
            for i in (0, 4):
                await nodes.stop(i, empties=True)
            left = fewer - {0, 4}
            views.hand(nodes, 3, left, left)
            await until(lambda: is_in(nodes, 3))
            await nodes.settle()
            await nodes.start(*(everyone - left), views=views)
            views.hand(nodes, 4, everyone, everyone)
            await until(lambda: is_in(nodes, 4))
            await nodes.read_all()
            assert is_read_once(source, 16)

    with FaultySource(make_files(6, 9 << 20)) as source:
        asyncio.run(run())


@pytest.mark.parametrize("seed", [0, 3])
def test_views_that_change_while_all_read_hold_up_nobody(seed: int, tmp_path: Path) -> None:
    """Each node has each view at another time, and some views are passed over by a later one."""

    async def run() -> None:
        rng = random.Random(seed)
        async with NodesOf(tmp_path, source, 6, PATIENT) as nodes:
            views = HandedViews(2)
            await nodes.start(*range(6), views=views)
            views.hand(nodes, 1, range(2), range(2))
            await until(lambda: is_in(nodes, 1, 0, 1))
            reading = asyncio.ensure_future(nodes.read_all(0, 1))
            for count in range(3, 7):
                await until(partial(is_more_read, source, source.bytes + (1 << 20)))
                for i in rng.sample(range(count), count):
                    views.hand(nodes, count - 1, range(count), [i])
                    await asyncio.sleep(rng.random() * 0.2)
            await until(lambda: is_in(nodes, 5))
            assert not reading.done()
            await reading
            await nodes.read_all()
            assert is_read_once(source, 20)

    with FaultySource(make_files(5, 12 << 20, seed), Faults(rate=5e6)) as source:
        asyncio.run(run())


def test_a_node_gets_nothing_for_who_is_in_another_view(tmp_path: Path) -> None:
    """Or they might wait for one another in a circle. What it holds it gives to everybody."""

    async def run() -> None:
        async with NodesOf(tmp_path, source, 2, PATIENT) as nodes:
            views = HandedViews(2)
            await nodes.start(0, 1, views=views)
            views.hand(nodes, 3, range(2), range(2))
            await nodes.read(1, "d/0")
            key = await nodes.key("d/0")
            peer = nodes.cluster(0)._peers[nodes.names[1]]
            want = Want(key, pages_of_file(key.size))
            for number in (2, 4):
                with pytest.raises(OtherViewError, match=f"is in view 3, not {number}"):
                    await peer.fetch(want, number, Ask.ALL)
                _, data = await peer.fetch(want, number, Ask.HELD)
                assert bytes(data) == source.files["d/0"]
            assert is_read_once(source, 2)

    with FaultySource({"d/0": bytes(range(256)) * 1000}) as source:
        asyncio.run(run())


def test_who_has_been_left_out_waits_for_nobody(tmp_path: Path) -> None:
    """A node that has not heard of the view without it reads what is due soon at once: the others tell it."""

    async def run() -> None:
        async with NodesOf(tmp_path, source, 3, PATIENT) as nodes:
            views = HandedViews(3)
            await nodes.start(0, 1, 2, views=views)
            views.hand(nodes, 1, range(3), range(3))
            await until(lambda: is_in(nodes, 1))
            views.hand(nodes, 2, range(2), range(2))
            await until(lambda: is_in(nodes, 2, 0, 1))
            # It would wait for the home as long as for one that is silent, 20 seconds a file
            began = time.monotonic()
            await asyncio.gather(*(nodes.read(2, name) for name in source.files))
            assert time.monotonic() - began < PATIENT.silent
            key = await nodes.key("d/0")
            peer = nodes.cluster(2)._peers[nodes.names[0]]
            with pytest.raises(
                AwayError, match=f"is in view 2, which does not include {nodes.names[2]}"
            ):
                await peer.fetch(Want(key, pages_of_file(key.size)), 1, Ask.ALL)
            # One that is in a later view is waited for
            with pytest.raises(OtherViewError, match="is in view 2, not 3"):
                await peer.fetch(Want(key, pages_of_file(key.size)), 3, Ask.ALL)

    with FaultySource({f"d/{i}": bytes([i]) * 200_000 for i in range(9)}) as source:
        asyncio.run(run())
