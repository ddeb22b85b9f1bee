"""Fetches pages for all who need them, and stores them. No page is fetched twice at a time."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np

from megablend.errors import ChangedFileError, DataError, ResourceError
from megablend.mirror.disk.database import SourceState
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
from megablend.mirror.disk.room import Need

P = ParamSpec("P")
T = TypeVar("T")
SOON_SECONDS = 15.0
"""Pages that are due within this time do not wait for a node that may come back."""
_MAX_SERVED = 32
"""The number of portions that are fetched at a time for readers: each may take a connection."""
_MAX_TRIES = 8
"""The number of rounds in which a call fetches its pages: pages that it has fetched may be evicted
before the others are held, and fetches of other calls may fail."""


class Mode(enum.Enum):
    """The places from which pages are fetched."""

    NEEDED = enum.auto()
    """Other nodes, and the source if none of them provides the pages."""
    COPY = enum.auto()
    """Other nodes only: this node keeps copies for them."""
    FRESH = enum.auto()
    """The same as NEEDED, after the pages that this node holds turned out to be wrong. If this disk
    has not changed them, nodes that may have them from the same place are not asked."""


class Want(NamedTuple):
    """Pages of a file that should be held."""

    key: FileKey
    pages: Pages
    due: float = math.inf
    """The time at which the pages will be read, by the monotonic clock; infinite if unknown."""
    mode: Mode = Mode.NEEDED

    @classmethod
    def of(cls, need: Need, mode: Mode = Mode.NEEDED) -> Want:
        """Make a want of a need's pages, all due at the earliest of its due times."""
        return cls(need.key, need.pages, float(np.min(need.due, initial=math.inf)), mode)


class Origins(NamedTuple):
    """The number of bytes that came from the source, and from other nodes."""

    source: int = 0
    peers: int = 0


def sum_origins(parts: Iterable[Origins]) -> Origins:
    """Add up the bytes of several reads."""
    sources, peers = zip(Origins(), *parts, strict=True)
    return Origins(sum(sources), sum(peers))


Keep: TypeAlias = Callable[[Pages, memoryview, Origins], Awaitable[None]]
"""Stores pages, given their bytes one after another, and the origins of these bytes."""


class PageReader(Protocol):
    """Fetches pages for an engine."""

    async def read(self, want: Want, keep: Keep) -> None:
        """Call `keep` with all pages of the want, which are of one portion, in any order.

        Raises: the same errors as Storage.read; ConfigError if the file may not be read here;
            AwayError if the pages have to wait for a node that has them.
        """
        ...


class AwayError(Exception):
    """A node is unreachable, and the pages that it has can wait for it."""


@dataclass(eq=False)
class _Flight:
    """One fetch of pages of one portion, which several calls may await."""

    want: Want
    origins: Origins = field(default_factory=Origins)
    task: asyncio.Task[None] = field(init=False)


class Engine:
    """Fetches, stores and reads pages for a node process.

    Args:
        store: the pages of this machine; used by one thread.
        reader: reads the pages that the store does not hold.
    """

    def __init__(self, store: PageStore, reader: PageReader) -> None:
        self.store = store
        self._reader = reader
        self.lead = SOON_SECONDS
        """Pages that are due after more seconds than this do not displace pages with a due time,
        since those would have to be fetched twice."""
        self._disk = ThreadPoolExecutor(1, "megablend-disk")
        self._turns = asyncio.Semaphore(_MAX_SERVED)
        self._flights: dict[tuple[str, int], list[_Flight]] = {}
        """The fetches that are in progress, by file digest and number of the portion."""
        self.peer_bytes = 0
        """The number of bytes that came from other nodes."""
        self._reserved: dict[_Flight, int] = {}
        """The number of bytes that each fetch has yet to store; used by the store's thread."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the store in its thread."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._disk, call)

    async def serve(self, want: Want) -> Origins:
        """Fetch pages as `obtain` does, for a reader of this machine: a few portions at a time."""

        async def get(portion: Pages) -> Origins:
            # Only readers of this machine take turns: if other nodes also did, nodes could wait
            # for one another's turns for ever
            async with self._turns:
                return await self.obtain(want._replace(pages=portion))

        portions = split_portions(want.pages)
        return sum_origins(await asyncio.gather(*map(get, portions)))

    async def obtain(self, want: Want) -> Origins:
        """Fetch the pages that are not held, and wait until all of them are.

        Returns: the bytes that were fetched for this call, not those of other calls' fetches.

        Raises: the same errors as the reader; ResourceError if there is no room for the pages.
        """
        if want.mode is Mode.FRESH:
            held, _ = await self.read_held(want)
            if subtract(want.pages, held):
                # This disk has changed some pages, which are dropped now: other nodes may have
                # correct ones
                want = want._replace(mode=Mode.NEEDED)
            else:
                await self.call(self.store.drop, want.key, want.pages)
        own_flights: list[_Flight] = []
        for _ in range(_MAX_TRIES):
            missing = await self.call(self._find_missing, want)
            if not missing:
                break
            joined_flights = self._find_flights(want.key, missing)
            for flight in joined_flights:
                missing = subtract(missing, flight.want.pages)
            new_flights = [
                self._start(want._replace(pages=part)) for part in split_portions(missing)
            ]
            own_flights += new_flights
            # Shielded, since other calls may await them: they continue if this call is cancelled
            await asyncio.gather(*(asyncio.shield(flight.task) for flight in new_flights))
            if not joined_flights:
                break
            joined = [flight.task for flight in joined_flights]
            await asyncio.wait(joined)
            if want.due == math.inf:
                # In the background, what the source said to another call need not be asked again
                errors = [task.exception() for task in joined if not task.cancelled()]
                for error in errors:
                    if isinstance(error, DataError):
                        raise error
        else:
            raise ResourceError(
                f"{self.store.folder.path}: pages are evicted before they are read; raise `mirror.size`"
            )
        return sum_origins(flight.origins for flight in own_flights)

    def _find_missing(self, want: Want) -> Pages:
        """Return the pages that are not held. If all are held, record that they are used now."""
        missing = self.store.missing(want.key, want.pages)
        if not missing:
            self.store.touch(want.key, want.pages)
        return missing

    def _find_flights(self, key: FileKey, pages: Pages) -> list[_Flight]:
        """Return the fetches of some of the pages that are in progress."""
        return [
            flight
            for part in split_portions(pages)
            for flight in self._flights.get(_portion_of(key, part), [])
            if intersect(part, flight.want.pages)
        ]

    def _start(self, want: Want) -> _Flight:
        """Start to fetch pages of one portion."""
        flight = _Flight(want)
        self._flights.setdefault(_portion_of(want.key, want.pages), []).append(flight)
        flight.task = asyncio.ensure_future(self._fetch(flight))
        flight.task.add_done_callback(partial(self._land, flight))
        return flight

    async def _fetch(self, flight: _Flight) -> None:
        want = flight.want
        await self.call(self._reserve, flight)

        async def keep(part: Pages, data: memoryview, origins: Origins) -> None:
            flight.origins = sum_origins([flight.origins, origins])
            self.peer_bytes += origins.peers
            await self.call(self._write, flight, part, data)

        try:
            await self._reader.read(want, keep)
        except ChangedFileError:
            # The file's known state is outdated: it has to be checked before it is used again
            location, etag, size = want.key
            state = await self.call(self.store.states.get, location)
            if state is None:
                state = SourceState(size, etag, 0.0)
            await self.call(self.store.states.put, location, state._replace(checked_at=0.0))
            raise

    def _reserve(self, flight: _Flight) -> None:
        """Make room for pages, in addition to the pages of other fetches that are due as early or
        earlier. Raises: ResourceError if there is too little."""
        want = flight.want
        is_far = want.due > time.monotonic() + self.lead
        due = math.inf if is_far else want.due
        ahead_bytes = sum(size for other, size in self._reserved.items() if other.want.due <= due)
        self._check_room(self.store.make_room(want.key, want.pages, due, ahead_bytes))
        self._reserved[flight] = count_bytes(want.pages, want.key.size)

    def _write(self, flight: _Flight, part: Pages, data: memoryview) -> None:
        self._reserved[flight] -= len(data)
        self._check_room(self.store.write(flight.want.key, part, data, flight.want.due))

    def _check_room(self, is_enough: bool) -> None:
        if not is_enough:
            raise ResourceError(
                f"{self.store.folder.path}: the mirror has no room for the pages that are needed now\n"
                "free space, lower `reserve`, or raise `mirror.size`"
            )

    def _land(self, flight: _Flight, task: asyncio.Task[None]) -> None:
        """Forget a fetch that has ended. This is not done in a `finally` of `_fetch`, which would
        also run when a pending fetch is collected as garbage, perhaps inside another `submit`: that
        would wait for its lock forever."""
        self._disk.submit(self._reserved.pop, flight, 0)
        if not task.cancelled():
            task.exception()  # retrieved, since perhaps no call awaits it any longer
        portion = _portion_of(flight.want.key, flight.want.pages)
        flights = self._flights[portion]
        flights.remove(flight)
        if not flights:
            del self._flights[portion]

    async def read_held(self, want: Want) -> tuple[Pages, bytes]:
        """Read the pages that are held, and whose checksums are right.

        Returns: these pages, and their bytes one after another.
        """

        def read() -> tuple[Pages, bytes]:
            while True:
                held = subtract(want.pages, self.store.missing(want.key, want.pages))
                data = self.store.read(want.key, held)
                if data is not None:  # otherwise the damaged pages are no longer held
                    return held, data

        return await self.call(read)

    async def close(self) -> None:
        """Stop all fetches, make the held pages durable, and close the store."""
        for flights in self._flights.values():
            for flight in list(flights):
                flight.task.cancel()
        await self.call(self.store.sync)
        await self.call(self.store.close)


def is_soon(due: float) -> bool:
    """Return whether pages are due so soon that they cannot wait for a node that may come back."""
    return due < time.monotonic() + SOON_SECONDS


def _portion_of(key: FileKey, pages: Pages) -> tuple[str, int]:
    """Return the digest of the file, and the number of the portion that contains `pages`."""
    return key.digest, int(pages.blocks[0]) // PORTION_BLOCKS
