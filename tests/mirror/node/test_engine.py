"""Each page is got once at a time, and only if there is room for it."""

from __future__ import annotations

import asyncio
import errno
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.thread import _global_shutdown_lock
from pathlib import Path

import pytest

from megablend.errors import DataError, MissingFileError, ResourceError
from megablend.mirror.disk.disk_calls import DiskCalls
from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import (
    NO_PAGES,
    PAGE_BYTES,
    count_bytes,
    pages_of_file,
    split_portions,
    unite,
)
from megablend.mirror.disk.room import Need
from megablend.mirror.node.engine import (
    SOON_SECONDS,
    AwayError,
    Engine,
    Keep,
    Mode,
    Origins,
    Want,
)
from megablend.mirror.node.needs import Needs
from tests.mirror.disk.mirrors import bytes_of, pages_at
from tests.mirror.node.needs_of import make_need

KEY = FileKey("s3://bucket/file", "e", 5 << 20)
SOON = 1e9
"""Later than now, earlier than never."""


class StubReader:
    """Records what it is asked for, and answers when it is told to."""

    def __init__(self) -> None:
        self.wants: list[Want] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: list[Exception] = []

    async def read(self, want: Want, keep: Keep) -> None:
        self.wants.append(want)
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        data = bytes_of(want.key, want.pages)
        await keep(want.pages, memoryview(data), Origins(source=len(data)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[MirrorFolder]:
    made = MirrorFolder.create(tmp_path / "mirror", group=None)
    with made.lock():
        yield made


def make_engine(folder: MirrorFolder, size: int | None = None) -> tuple[Engine, StubReader]:
    reader = StubReader()
    return Engine(PageStore(folder, size=size, reserve=0), reader), reader


def test_pages_are_asked_for_by_portions_and_held_then(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder)
        every = pages_of_file(KEY.size)
        assert await engine.obtain(Want(KEY, every)) == Origins(source=KEY.size)
        assert [each.pages.blocks.tolist() for each in reader.wants] == [
            list(range(4 * i, 4 * i + 4)) for i in range(5)
        ]
        held, data = await engine.read_held(Want(KEY, every))
        assert data == bytes_of(KEY, every)
        assert count_bytes(held, KEY.size) == KEY.size
        assert await engine.obtain(Want(KEY, every)) == Origins()
        assert len(reader.wants) == 5
        await engine.close()

    asyncio.run(run())


def test_what_is_on_its_way_is_waited_for(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder)
        reader.gate.clear()
        first = asyncio.ensure_future(engine.obtain(Want(KEY, pages_at((0, 300_000)))))
        while len(reader.wants) < 1:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(engine.obtain(Want(KEY, pages_at((100_000, 400_000)))))
        while len(reader.wants) < 2:
            await asyncio.sleep(0.001)
        first.cancel()  # the other one goes on
        reader.gate.set()
        await second
        both = unite(reader.wants[0].pages, reader.wants[1].pages)
        asked = sum(count_bytes(each.pages, KEY.size) for each in reader.wants)
        assert asked == count_bytes(both, KEY.size)
        await engine.close()

    asyncio.run(run())


def test_a_want_does_not_fail_with_the_copy_that_it_waits_for(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder)
        reader.gate.clear()
        reader.errors.append(AwayError())
        pages = pages_at((0, 9000))
        copy = asyncio.ensure_future(engine.obtain(Want(KEY, pages, math.inf, Mode.COPY)))
        while len(reader.wants) < 1:
            await asyncio.sleep(0.001)
        want = asyncio.ensure_future(engine.obtain(Want(KEY, pages, time.monotonic())))
        await asyncio.sleep(0.05)
        assert len(reader.wants) == 1
        reader.gate.set()
        with pytest.raises(AwayError):
            await copy
        await want
        assert [each.mode for each in reader.wants] == [Mode.COPY, Mode.NEEDED]
        await engine.close()

    asyncio.run(run())


def test_a_failure_is_the_caller_s(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder)
        reader.errors.append(MissingFileError(KEY.location, "is gone"))
        with pytest.raises(MissingFileError):
            await engine.obtain(Want(KEY, pages_at((0, 9000))))
        await engine.obtain(Want(KEY, pages_at((0, 9000))))
        await engine.close()

    asyncio.run(run())


def test_what_is_held_does_not_fail_with_what_another_call_lacks(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder)
        await engine.obtain(Want(KEY, pages_at((0, 4096))))
        reader.errors.append(MissingFileError(KEY.location, "is gone"))
        is_free = threading.Event()
        busy = asyncio.ensure_future(engine.call(is_free.wait))
        more = asyncio.ensure_future(engine.obtain(Want(KEY, pages_at((0, 9000)))))
        await asyncio.sleep(0.01)
        held = asyncio.ensure_future(engine.obtain(Want(KEY, pages_at((0, 4096)))))
        await asyncio.sleep(0.01)
        is_free.set()
        await busy
        with pytest.raises(MissingFileError):
            await more
        assert await held == Origins()
        assert len(reader.wants) == 2
        await engine.close()

    asyncio.run(run())


def test_nothing_is_fetched_that_there_is_no_room_for(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder, size=2 << 20)
        soon = time.monotonic() + SOON_SECONDS - 5
        await engine.obtain(Want(KEY, pages_at((0, 2 << 20)), soon))
        with pytest.raises(ResourceError):
            await engine.obtain(Want(KEY, pages_at((2 << 20, 1 << 20)), soon + 1))
        assert len(reader.wants) == 2
        await engine.obtain(Want(KEY, pages_at((2 << 20, 1 << 20)), soon - 1))
        assert len(reader.wants) == 3
        await engine.close()

    asyncio.run(run())


def test_nothing_is_fetched_that_cannot_be_written(folder: MirrorFolder) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    async def run() -> None:
        store = PageStore(folder, size=None, reserve=0, calls=DiskCalls()._replace(check=fail))
        reader = StubReader()
        with pytest.raises(
            DataError, match="the mirror's disk failed: Read-only file system; make"
        ):
            await Engine(store, reader).obtain(Want(KEY, pages_at((0, 3))))
        assert not reader.wants

    asyncio.run(run())


def test_what_is_not_due_soon_displaces_only_what_is_never_due(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder, size=2 << 20)
        later = time.monotonic() + 1000
        await engine.obtain(Want(KEY, pages_at((0, 1 << 20)), later + 1))
        await engine.obtain(Want(KEY, pages_at((1 << 20, 1 << 20))))
        await engine.obtain(Want(KEY, pages_at((2 << 20, 1 << 20)), later))
        with pytest.raises(ResourceError):
            await engine.obtain(Want(KEY, pages_at((3 << 20, 1 << 20)), later))
        assert len(reader.wants) == 3
        engine.lead = 2000.0
        await engine.obtain(Want(KEY, pages_at((3 << 20, 1 << 20)), later))
        held = await engine.call(engine.store.held, KEY)
        assert held.blocks.tolist() == [*range(8, 16)]
        await engine.close()

    asyncio.run(run())


def test_what_is_on_its_way_has_its_room(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder, size=2 << 20)
        reader.gate.clear()
        coming = asyncio.ensure_future(engine.obtain(Want(KEY, pages_at((0, 2 << 20)), SOON)))
        while len(reader.wants) < 2:
            await asyncio.sleep(0.001)
        with pytest.raises(ResourceError):
            await engine.obtain(Want(KEY, pages_at((2 << 20, 1 << 20)), SOON + 1))
        assert len(reader.wants) == 2
        reader.gate.set()
        await coming
        await engine.close()

    asyncio.run(run())


def test_small_files_on_their_way_have_their_room(folder: MirrorFolder) -> None:
    """Each takes a page of 4 KiB, however small it is."""

    async def run() -> None:
        engine, reader = make_engine(folder, size=10 * PAGE_BYTES)
        reader.gate.clear()
        pages = pages_of_file(700)
        due = time.monotonic()
        keys = [FileKey(f"s3://bucket/{i}", "e", 700) for i in range(30)]
        wants = [asyncio.ensure_future(engine.obtain(Want(key, pages, due))) for key in keys]
        while sum(want.done() for want in wants) + len(reader.wants) < len(wants):
            await asyncio.sleep(0.001)
        reader.gate.set()
        await asyncio.wait(wants)
        assert sum(want.exception() is None for want in wants) == len(reader.wants) == 10
        await engine.close()

    asyncio.run(run())


def test_wrong_pages_are_got_again(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder)
        pages = pages_at((0, PAGE_BYTES))
        await engine.obtain(Want(KEY, pages))
        await engine.obtain(Want(KEY, pages, time.monotonic(), Mode.FRESH))
        assert [each.mode for each in reader.wants] == [Mode.NEEDED, Mode.FRESH]
        await engine.close()

    asyncio.run(run())


def test_what_is_due_is_fetched_in_its_order_and_waits_for_room(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder, size=2 << 20)
        needs = Needs(engine)
        running = asyncio.ensure_future(needs.run())
        now = time.monotonic() + 100
        # Portions 4, 3, 2, ... are due one after another
        needs.set("client", [make_need(KEY, [(i, 2**64 - 1, now - 5 * i) for i in range(20)])])
        while len(reader.wants) < 8:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        assert [each.pages.blocks.tolist() for each in reader.wants][:1] == [[19]]
        asked = sum(count_bytes(each.pages, KEY.size) for each in reader.wants)
        assert asked == 2 << 20  # nothing that did not have room
        first = {b for each in reader.wants for b in each.pages.blocks.tolist()}
        assert first == set(range(12, 20))
        # The first ones were read, and are due no more
        needs.set("client", [make_need(KEY, [(i, 2**64 - 1, now - 5 * i) for i in range(12)])])
        while len(reader.wants) < 16:
            await asyncio.sleep(0.001)
        asked = sum(count_bytes(each.pages, KEY.size) for each in reader.wants)
        assert asked <= 4 << 20
        running.cancel()
        await asyncio.wait([running])
        await engine.close()

    asyncio.run(run())


def test_what_failed_is_fetched_later(folder: MirrorFolder) -> None:
    async def run() -> None:
        engine, reader = make_engine(folder)
        reader.errors = [MissingFileError(KEY.location, "it is not there yet")]
        needs = Needs(engine)
        running = asyncio.ensure_future(needs.run())
        every = pages_of_file(KEY.size)
        needs.set("client", [Need.of(KEY, every, time.monotonic() + 100)])
        while engine.store.missing(KEY, every).blocks.size:
            await asyncio.sleep(0.01)
        assert len(reader.wants) == len(split_portions(every)) + 1
        running.cancel()
        await asyncio.wait([running])
        await engine.close()

    asyncio.run(run())


def test_a_fetch_that_is_collected_as_garbage_waits_for_no_lock(folder: MirrorFolder) -> None:
    """Such as that of the executor in whose `submit` the garbage is collected."""

    async def run() -> None:
        engine, reader = make_engine(folder)
        reader.gate.clear()
        obtaining = asyncio.ensure_future(engine.obtain(Want(KEY, pages_at((0, 300_000)))))
        while not reader.wants:
            await asyncio.sleep(0.001)
        ((flight,),) = engine._flights.values()
        fetch = flight.task.get_coro()
        assert fetch is not None
        collecting = threading.Thread(target=fetch.close)
        with _global_shutdown_lock:
            collecting.start()
            collecting.join(10)
            is_waiting = collecting.is_alive()
        collecting.join()
        assert not is_waiting
        obtaining.cancel()
        await engine.close()

    asyncio.run(run())


def test_nobody_waits_for_what_cannot_be_fetched(folder: MirrorFolder) -> None:
    """Datasets are fetched while nothing is fetched for jobs, also if a job needs what is gone."""

    async def run() -> None:
        engine, reader = make_engine(folder)
        reader.errors = [MissingFileError(KEY.location, "is gone")] * 1000
        needs = Needs(engine)
        running = asyncio.ensure_future(needs.run())
        needs.set("client", [Need.of(KEY, pages_of_file(KEY.size), time.monotonic() + 100)])
        while not needs.is_fetching:
            await asyncio.sleep(0.001)
        while needs.is_fetching:
            await asyncio.sleep(0.01)
        assert engine.store.missing(KEY, pages_of_file(KEY.size)).blocks.size
        running.cancel()
        await asyncio.wait([running])
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_nodes_do_not_tell_one_another_again_and_again(folder: MirrorFolder) -> None:
    """What another node tells is no reason to tell it what this one needs."""

    async def run() -> None:
        engine, _ = make_engine(folder)
        told: list[int] = []

        async def tell(found: Sequence[Need]) -> None:
            told.append(len(found))
            needs.set_of_node("other", [])

        needs = Needs(engine, tell)
        running = asyncio.ensure_future(needs.run())
        every = pages_of_file(KEY.size)
        for count in (1, 2):
            needs.set("client", [Need.of(KEY, every, time.monotonic() + 100)] * count)
            while len(told) < count:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)  # in which it would be told some five times
        assert told == [1, 2]
        needs.announce_again()
        while len(told) < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        await engine.close()

    asyncio.run(run())


def test_portions_hold_all_pages() -> None:
    pages = pages_at((0, 5000), (3 << 20, 1 << 20), (4 << 20, 2 << 20))
    parts = split_portions(pages)
    assert [part.blocks.tolist() for part in parts] == [
        [0],
        [12, 13, 14, 15],
        [16, 17, 18, 19],
        [20, 21, 22, 23],
    ]
    assert split_portions(NO_PAGES) == []
