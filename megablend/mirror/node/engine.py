"""Gets pages for whoever asks, each of them once at a time, and stores them."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from megablend.errors import ChangedFileError, ResourceError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import (
    PORTION_BLOCKS,
    Pages,
    count_bytes,
    intersect,
    split_portions,
    subtract,
)

T = TypeVar("T")
SOON_SECONDS = 15.0
_MAX_SERVED = 32
"""Portions that are got at a time for the readers of this machine: each may take a connection."""
_TRIES = 8
"""Times that pages are got which somebody else was getting, or which are evicted meanwhile."""


class Mode(enum.Enum):
    """How pages are got."""

    NEEDED = enum.auto()
    """From whoever has them, at last from the source."""
    COPY = enum.auto()
    """From other nodes only, to be kept for them."""
    FRESH = enum.auto()
    """As NEEDED, after those that this node holds were wrong: if they are as they were written, not
    from those who may have them from the same place."""


class Want(NamedTuple):
    """Pages of a file that are to be got."""

    key: FileKey
    pages: Pages
    due: float = math.inf
    """Seconds of the monotonic clock; infinite: never."""
    mode: Mode = Mode.NEEDED


class Origins(NamedTuple):
    """Where bytes came from."""

    source: int = 0
    peers: int = 0


Keep: TypeAlias = Callable[[Pages, memoryview, Origins], Awaitable[None]]
"""Stores pages, whose bytes follow one another and came from there."""


class PageReader(Protocol):
    """Where an engine gets pages from."""

    async def read(self, want: Want, keep: Keep) -> None:
        """Call `keep` with all pages of the want, in portions in any order. The want's pages are of
        one portion.

        Raises: as Storage.read does; ConfigError if they may not be read here; AwayError if a node
            that has them is waited for.
        """
        ...


class AwayError(Exception):
    """A node does not answer; what it has is not due so soon that it is not waited for."""


class _Flight:
    """Pages of one portion that are on their way."""

    def __init__(self, want: Want) -> None:
        self.want = want
        self.source = 0
        self.peers = 0
        self.task: asyncio.Task[None]


class Engine:
    """All that a node process does with pages.

    Args:
        store: the folder; used by one thread.
        reader: gets what it does not have.
    """

    def __init__(self, store: PageStore, reader: PageReader) -> None:
        self.store = store
        self._reader = reader
        self.lead = SOON_SECONDS
        """Seconds. What is due later displaces only what is never due: it is fetched once in any
        case, but what it displaces would be fetched twice."""
        self._disk = ThreadPoolExecutor(1, "megablend-disk")
        self._turns = asyncio.Semaphore(_MAX_SERVED)
        self._flights: dict[tuple[str, int], list[_Flight]] = {}
        """By file and portion."""
        self.peer_bytes = 0
        """Bytes that came from other nodes."""
        self._reserved: dict[_Flight, int] = {}
        """Bytes that are on their way; used by the store's thread."""

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the store in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, function, *arguments)

    async def serve(self, want: Want) -> Origins:
        """As `obtain`, for a reader of this machine: a few portions at a time."""

        async def get(part: Pages) -> Origins:
            # Before the pages are on their way: another node that wants them does not wait for this
            # node's turns, or nodes might wait for one another's
            async with self._turns:
                return await self.obtain(want._replace(pages=part))

        found = await asyncio.gather(*(get(part) for part in split_portions(want.pages)))
        return Origins(sum(each.source for each in found), sum(each.peers for each in found))

    async def obtain(self, want: Want) -> Origins:
        """Return when the pages were held, all of them.

        Returns: the bytes that were got for this call alone.

        Raises: as the reader does; ResourceError if there is no room for them.
        """
        if want.mode is Mode.FRESH:
            held, _ = await self.read_held(want)
            if len(subtract(want.pages, held).blocks):
                # Some were changed on this disk, and are dropped now: what others have may be right
                want = want._replace(mode=Mode.NEEDED)
            else:
                await self.call(self.store.drop, want.key, want.pages)
        started = list[_Flight]()
        for _ in range(_TRIES):
            missing = await self.call(self._look, want)
            if not len(missing.blocks):
                break
            own = list[_Flight]()
            others = list[_Flight]()
            for part in split_portions(missing):
                for flight in self._flights.get(_place_of(want.key, part), []):
                    if len(intersect(part, flight.want.pages).blocks):
                        others.append(flight)
                        part = subtract(part, flight.want.pages)
                if len(part.blocks):
                    own.append(self._start(want._replace(pages=part)))
            started += own
            # Others may wait for them, too: they go on if this call is cancelled
            await asyncio.gather(*(asyncio.shield(each.task) for each in own))
            if not others:
                break
            await asyncio.wait([each.task for each in others])
        else:
            raise ResourceError(
                f"{self.store.folder.path}: pages are evicted before they are read; raise `size` of `mirror`"
            )
        return Origins(sum(each.source for each in started), sum(each.peers for each in started))

    def _look(self, want: Want) -> Pages:
        """What is missing; if nothing is, all is used now."""
        missing = self.store.missing(want.key, want.pages)
        if not len(missing.blocks):
            self.store.touch(want.key, want.pages)
        return missing

    def _start(self, want: Want) -> _Flight:
        flight = _Flight(want)
        self._flights.setdefault(_place_of(want.key, want.pages), []).append(flight)
        flight.task = asyncio.ensure_future(self._fetch(flight))
        flight.task.add_done_callback(partial(self._land, flight))
        return flight

    async def _fetch(self, flight: _Flight) -> None:
        want = flight.want
        if not await self.call(self._reserve, flight):
            raise self._no_room()

        async def keep(part: Pages, data: memoryview, origins: Origins) -> None:
            flight.source += origins.source
            flight.peers += origins.peers
            self.peer_bytes += origins.peers
            if not await self.call(self._write, flight, part, data):
                raise self._no_room()

        try:
            await self._reader.read(want, keep)
        except ChangedFileError:
            # What is known of the file is too old
            if (known := await self.call(self.store.get_state, want.key.location)) is not None:
                await self.call(self.store.put_state, want.key.location, known[0], known[1], 0.0)
            raise
        finally:
            self._disk.submit(self._reserved.pop, flight, 0)

    def _reserve(self, flight: _Flight) -> bool:
        """Whether there is room for pages beside those that are on their way and due as early."""
        want = flight.want
        is_early = want.due > time.monotonic() + self.lead
        due = None if is_early else _due_of(want)
        before = sum(
            size
            for other, size in self._reserved.items()
            if due is None or other.want.due <= want.due
        )
        if not self.store.make_room(want.key, want.pages, due, before):
            return False
        self._reserved[flight] = count_bytes(want.pages, want.key.size)
        return True

    def _write(self, flight: _Flight, part: Pages, data: memoryview) -> bool:
        self._reserved[flight] -= len(data)
        return self.store.write(flight.want.key, part, data, _due_of(flight.want))

    def _no_room(self) -> ResourceError:
        return ResourceError(
            f"{self.store.folder.path}: the mirror has no room for what is needed now\n"
            "free space, lower `reserve`, or raise `size` of `mirror`"
        )

    def _land(self, flight: _Flight, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more
        place = _place_of(flight.want.key, flight.want.pages)
        flights = self._flights[place]
        flights.remove(flight)
        if not flights:
            del self._flights[place]

    async def read_held(self, want: Want) -> tuple[Pages, bytes]:
        """Those of the pages that are held, and whose checksums are right, with their bytes one
        after another."""

        def read() -> tuple[Pages, bytes]:
            while True:
                held = subtract(want.pages, self.store.missing(want.key, want.pages))
                data = self.store.read(want.key, held)
                if data is not None:  # else what is damaged is not held any more
                    return held, data

        return await self.call(read)

    async def close(self) -> None:
        """Make all durable, and close the folder."""
        for flights in self._flights.values():
            for flight in list(flights):
                flight.task.cancel()
        await self.call(self.store.sync)
        await self.call(self.store.close)


def is_soon(due: float) -> bool:
    """Whether something is due so soon that nobody is waited for who may come back."""
    return due < time.monotonic() + SOON_SECONDS


def _place_of(key: FileKey, pages: Pages) -> tuple[str, int]:
    """The file and portion of pages of one portion."""
    return key.digest, int(pages.blocks[0]) // PORTION_BLOCKS


def _due_of(want: Want) -> float | None:
    return None if want.due == math.inf else want.due
