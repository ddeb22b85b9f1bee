"""1,000 nodes and 60 TB, on the real homes, holders, routes and due times: balance, what a death moves,
and the memory of one node."""

from __future__ import annotations

import asyncio
import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from megablend.mirror.catalog import catalog
from megablend.mirror.catalog.holding import _select_own as select_share
from megablend.mirror.catalog.manifest import DataFile
from megablend.mirror.catalog.reconcile import Goal, find_short
from megablend.mirror.catalog.share import make_share
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import (
    NO_PAGES,
    PIECE_BLOCKS,
    Pages,
    count_bytes,
    pages_of_file,
)
from megablend.mirror.disk.room import Need, Room
from megablend.mirror.members.homes import Homes
from megablend.mirror.members.launchers import Pace
from megablend.mirror.node.due_order import find_lead, order_by_due
from megablend.mirror.node.engine import AwayError, Engine, Keep, Origins, Want
from megablend.mirror.peers.announcements import Announcements
from megablend.mirror.peers.copies import Copies
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.peer import Peer
from megablend.mirror.peers.placement import Placement
from megablend.mirror.peers.routes import Reading, Routes
from tests.mirror.manifests import make_manifest

NAMES = sorted(f"node{i}:7171" for i in range(1000))
FILE_BYTES = 6 << 30
KEYS = [FileKey(f"s3://bucket/{i:05}", "e", FILE_BYTES) for i in range(9300)]  # 60 TB
PIECES = FILE_BYTES // (PIECE_BLOCKS << 18)
WHOLE = np.uint64(2**64 - 1)


class StubStore:
    """Holds whatever it is asked for."""

    def missing(self, key: FileKey, pages: Pages) -> Pages:
        return NO_PAGES


class StubEngine:
    """Calls its store at once."""

    store = StubStore()

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def piece_pages(piece: int) -> Pages:
    blocks = np.arange(piece * PIECE_BLOCKS, (piece + 1) * PIECE_BLOCKS, dtype=np.uint32)
    return Pages(blocks, np.full(PIECE_BLOCKS, WHOLE))


def make_announcements(own: str) -> Announcements:
    others = [name for name in NAMES if name != own]
    return Announcements(cast(Engine, StubEngine()), Placement(NAMES, own, 2), others)


def test_who_keeps_a_copy_tells_its_giver_and_who_keeps_none_does_not() -> None:
    """The giver reads the copy if its own pages are damaged; it asks no other reader."""
    key = KEYS[0]
    home, copier, after = Placement(NAMES, NAMES[0], 2).order(key, 0, 3)
    reader = next(name for name in NAMES if name not in (home, copier, after))
    pages = pages_of_file(100_000)
    for own, giver, told in (
        (home, None, {copier, after}),
        (copier, home, {home, after}),
        (copier, reader, {home, after}),
        (after, home, {copier}),
        (reader, home, {copier, after}),
    ):
        announcements = make_announcements(own)
        announcements.note_own(key, pages, giver)
        assert {name for name in NAMES if name != own and announcements.take(name)} == told


def test_pieces_are_balanced_and_a_death_moves_only_those_of_the_dead() -> None:
    homes = Homes(NAMES)
    orders = np.concatenate([homes.order(key.digest, np.arange(PIECES), 3) for key in KEYS[:260]])
    counts = np.bincount(orders[:, :2].ravel(), minlength=1000)
    # By chance: mean 400, deviation 20
    assert counts.max() / counts.mean() < 1.25
    assert counts.min() / counts.mean() > 0.75
    dead = int(counts.argmax())
    others = np.delete(np.arange(1000), dead)
    after = np.concatenate(
        [
            others[Homes([NAMES[i] for i in others]).order(key.digest, np.arange(PIECES), 2)]
            for key in KEYS[:260]
        ]
    )
    is_moved = (after != orders[:, :2]).any(axis=1)
    assert np.array_equal(is_moved, (orders[:, :2] == dead).any(axis=1))
    # Whoever is second has them already; the third gets a copy
    was_first = orders[:, 0] == dead
    assert np.array_equal(after[was_first], orders[was_first, 1:])
    heirs = np.bincount(orders[was_first, 1], minlength=1000)
    assert heirs.max() <= 6  # of about 200 pieces


class StubPeer:
    """Has all that it is asked for, or is gone."""

    def __init__(self, name: str, asked: Counter[str], *, is_gone: bool) -> None:
        self._name = name
        self._asked = asked
        self.is_gone = is_gone

    async def fetch(self, want: Want, *_: object) -> tuple[Pages, memoryview]:
        if self.is_gone:
            raise AwayError(self._name)
        self._asked[self._name] += 1
        return want.pages, memoryview(bytes(count_bytes(want.pages, want.key.size)))


class StubSource:
    """Counts what it is asked for."""

    count = 0

    async def read(self, want: Want, keep: Keep) -> None:
        self.count += 1


def test_what_a_dead_node_kept_comes_from_the_second_home() -> None:
    async def run() -> None:
        announcements = make_announcements(NAMES[0])
        dead = NAMES[500]
        asked = Counter[str]()
        peers = {
            name: cast(Peer, StubPeer(name, asked, is_gone=name == dead)) for name in NAMES[1:]
        }
        source = StubSource()
        placement = Placement(NAMES, NAMES[0], 2)
        routes = Routes(source, placement, Holders(), announcements, peers, 0, None, [], Pace())
        expected = Counter[str]()
        num_bytes = 0

        async def keep(_: Pages, data: memoryview, origins: Origins) -> None:
            nonlocal num_bytes
            assert origins == Origins(peers=len(data))
            num_bytes += len(data)

        for key in KEYS[:500]:
            orders = Homes(NAMES).order(key.digest, np.arange(PIECES), 2)
            for piece in np.flatnonzero(orders[:, 0] == 500).tolist():
                second = NAMES[orders[piece, 1]]
                if second != NAMES[0]:
                    block = Pages(
                        np.array([piece * PIECE_BLOCKS], np.uint32), np.array([1], np.uint64)
                    )
                    await routes.read(Reading(Want(key, block, math.inf), keep))
                    expected[second] += 1
        assert sum(expected.values()) > 300
        assert asked == expected
        assert max(asked.values()) <= 6
        assert num_bytes == 4096 * sum(expected.values())
        assert source.count == 0

    asyncio.run(run())


@pytest.mark.slow
def test_a_node_of_a_thousand_needs_less_than_512_mib() -> None:
    """What it is told of the pieces that it is one of the first three of, each by another home and by
    a reader; what it will read itself, and what is kept for others, in two epochs."""

    async def run() -> int:
        rng = np.random.default_rng(0)
        num_pieces = 3 * len(KEYS) * PIECES // len(NAMES)
        tracemalloc.start()
        announcements = make_announcements(NAMES[0])
        holders = Holders()
        copies = Copies(cast(Engine, StubEngine()), Placement(NAMES, NAMES[0], 2), holders)
        for _ in range(num_pieces):
            key = KEYS[rng.integers(len(KEYS))]
            pages = piece_pages(int(rng.integers(PIECES)))
            for teller in rng.integers(1, len(NAMES), 2).tolist():
                need = Need.of(key, pages, math.inf)
                holders.note(NAMES[teller], [need])
                await copies.note_announced([need])
                announcements.note_own(key, pages, NAMES[teller])
        room = Room(lambda: [], lambda _, __: 0)
        own = len(KEYS) * PIECES * PIECE_BLOCKS // len(NAMES)
        needs = []
        for key in KEYS:
            blocks = rng.integers(0, FILE_BYTES >> 18, 4 * own // len(KEYS)).astype(np.uint32)
            due = time.monotonic() + rng.random(len(blocks)) * 1e5
            needs.append(Need(key, Pages(blocks, np.full(len(blocks), WHOLE)), due))
        room.set_due(needs)
        assert find_lead(needs, 1 << 30) > 0
        assert next(order_by_due(needs)).due < min(need.due.min() for need in needs) + 1
        return tracemalloc.get_traced_memory()[1]

    try:
        most = asyncio.run(run())
    finally:
        tracemalloc.stop()
    print(f"{most / 2**20:.0f} MiB")
    assert most < 512 << 20


@pytest.mark.slow
def test_what_a_node_computes_of_a_hundred_datasets_after_a_death() -> None:
    """Its share of 100 datasets of 12 GB, each in two copies, and what of it fits."""
    files = [DataFile(key.location, key) for key in KEYS[:200]]
    datasets = [make_share(make_manifest(files[2 * i : 2 * i + 2])) for i in range(100)]
    names = NAMES[:-1]
    began = time.process_time()
    own = [select_share(files, names, NAMES[0], 2) for files in datasets]
    sizes = [each.find_sizes() for each in own]
    goals = [
        Goal(
            catalog.Want(dataset=f"{i}", revision=catalog.LATEST, since=float(i)),
            catalog.Revision(
                dataset=f"{i}", digest="", num_files=2, num_bytes=0, added=0.0, sources=()
            ),
            is_pinned=False,
        )
        for i in range(100)
    ]
    assert not any(find_short(goals, sizes, 1 << 40, 0))
    took = time.process_time() - began
    total = sum(each.num_bytes for each in sizes)
    expected = 2 * 200 * FILE_BYTES / len(names)
    print(f"{took:.2f} s of CPU for {200 * PIECES:,} pieces; {total / expected:.2f} of the mean")
    assert 0.7 < total / expected < 1.3
    assert took < 20
