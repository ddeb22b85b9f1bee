"""Fetches pages for ranks, other nodes and datasets, and stores them. If several of them request a
page at the same time, it is fetched once."""

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
    PAGE_BYTES,
    PORTION_BLOCKS,
    Pages,
    count_pages,
    intersect,
    pages_of_file,
    split_portions,
    subtract,
)
from megablend.mirror.disk.room import Need
from megablend.mirror.disk.stored_file import SMALL_BYTES

P = ParamSpec("P")
T = TypeVar("T")
SOON_SECONDS = 15.0
"""Pages that are due within this number of seconds do not wait for an unreachable node to come
back."""
_MAX_SERVED = 32
"""The maximum number of portions that are fetched at a time for readers on this machine, since each
may take a connection."""
_MAX_TRIES = 8
"""The maximum number of rounds in which a call fetches its pages. One round may not be enough:
fetched pages may be evicted before the others are held, and fetches of other calls may fail."""


class Mode(enum.Enum):
    """The places from which pages may be fetched."""

    NEEDED = enum.auto()
    """Other nodes, or the source if no node provides the pages."""
    COPY = enum.auto()
    """Other nodes only, since the pages are copies that this node keeps in addition to them."""
    FRESH = enum.auto()
    """Like NEEDED, for pages that must be fetched again because their bytes turned out to be wrong.
    If this node's disk is not the cause, nodes that may hold the same wrong bytes are not asked."""


class Want(NamedTuple):
    """A request to hold pages of a file, with the places from which they may be fetched."""

    key: FileKey
    pages: Pages
    due: float = math.inf
    """The monotonic time at which the pages will be read; infinite if unknown."""
    mode: Mode = Mode.NEEDED

    @classmethod
    def of(cls, need: Need, mode: Mode = Mode.NEEDED) -> Want:
        """Make a want from a need. All its pages are due at the earliest due time of the need."""
        return cls(need.key, need.pages, float(np.min(need.due, initial=math.inf)), mode)


class Origins(NamedTuple):
    """The numbers of bytes that were fetched from the source and from other nodes."""

    source: int = 0
    peers: int = 0


def sum_origins(parts: Iterable[Origins]) -> Origins:
    """Return the sum of the origins of several reads."""
    sources, peers = zip(Origins(), *parts, strict=True)
    return Origins(sum(sources), sum(peers))


Keep: TypeAlias = Callable[[Pages, memoryview, Origins], Awaitable[None]]
"""A function that stores pages. Arguments: the pages, their bytes one page after another, and the
origins of the bytes."""


class PageReader(Protocol):
    """A reader that fetches pages for an engine."""

    async def read(self, want: Want, keep: Keep) -> None:
        """Fetch all pages of a want, which must be in one portion. Pass them to `keep`, in any
        order and in one or more calls.

        Raises: the same errors as Storage.read; ConfigError if this node may not read the file;
            AwayError if the pages have to wait for an unreachable node.
        """
        ...


class AwayError(Exception):
    """Raised if a node is unreachable."""


@dataclass(eq=False)
class _Flight:
    """A fetch in progress, of pages in one portion. Several calls may await it."""

    want: Want
    num_bytes: int = 0
    """The size of the pages that it has yet to store, 4 KiB each, for which there is room. Set in
    the store's thread."""
    origins: Origins = field(default_factory=Origins)
    task: asyncio.Task[None] = field(init=False)


class Engine:
    """Fetches, stores and reads pages for a node process.

    Args:
        store: the pages that this machine holds. It is used by only one thread.
        reader: fetches pages that the store does not hold.
    """

    def __init__(self, store: PageStore, reader: PageReader) -> None:
        self.store = store
        self._reader = reader
        self.lead = SOON_SECONDS
        """New pages displace other pages with a due time only if the new pages are due within this
        number of seconds, since displaced pages have to be fetched again."""
        self._disk = ThreadPoolExecutor(1, "megablend-disk")
        self._turns = asyncio.Semaphore(_MAX_SERVED)
        self._flights: dict[tuple[str, int], list[_Flight]] = {}
        """The fetches in progress, by the digest of the file and the number of the portion."""
        self.peer_bytes = 0
        """The number of bytes that were fetched from other nodes."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the store's thread, and return its result."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._disk, call)

    async def serve(self, want: Want) -> Origins:
        """Fetch pages as `obtain` does, but at most _MAX_SERVED portions at a time. This is for
        readers on this machine."""

        async def get(portion: Pages) -> Origins:
            # Only readers of this machine take turns: if other nodes also did, nodes could wait
            # for one another's turns for ever
            async with self._turns:
                return await self.obtain(want._replace(pages=portion))

        portions = split_portions(want.pages)
        if len(portions) == 1:
            return await get(want.pages)  # without a task
        return sum_origins(await asyncio.gather(*map(get, portions)))

    async def obtain(self, want: Want) -> Origins:
        """Fetch the pages of a want that are not held, and wait until all of its pages are held.

        Returns: the number of bytes that this call fetched. Bytes that other calls were already
            fetching do not count.

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
        if want.pages and want.key.size < SMALL_BYTES:
            want = want._replace(pages=pages_of_file(want.key.size))  # all are fetched together
        own_flights: list[_Flight] = []
        missing = want.pages  # at first; each flight finds those of its pages that are held
        for _ in range(_MAX_TRIES):
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
            missing = await self.call(self._find_missing, want)
            if not missing:
                break
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
        """Return the fetches in progress that include any of the pages."""
        return [
            flight
            for part in split_portions(pages)
            for flight in self._flights.get(_portion_of(key, part), [])
            if intersect(part, flight.want.pages)
        ]

    def _start(self, want: Want) -> _Flight:
        """Start to fetch the pages of a want, which are in one portion."""
        flight = _Flight(want)
        self._flights.setdefault(_portion_of(want.key, want.pages), []).append(flight)
        flight.task = asyncio.ensure_future(self._fetch(flight))
        flight.task.add_done_callback(partial(self._land, flight))
        return flight

    async def _fetch(self, flight: _Flight) -> None:
        missing = await self.call(self._reserve, flight)
        if not missing:
            return
        flight.want = want = flight.want._replace(pages=missing)

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

    def _reserve(self, flight: _Flight) -> Pages:
        """Make room for the missing pages of a fetch, in addition to those of other fetches that
        are not due later. Returns: the missing pages. Raises: ResourceError if there is not enough
        room."""
        want = flight.want
        missing = self._find_missing(want)
        if not missing:
            return missing
        is_far = want.due > time.monotonic() + self.lead
        due = math.inf if is_far else want.due
        # Copies of lists that the event loop's thread may change
        flights = [other for others in list(self._flights.values()) for other in list(others)]
        ahead_bytes = sum(other.num_bytes for other in flights if other.want.due <= due)
        size = count_pages(missing) * PAGE_BYTES  # on the disk, the last page is not shorter
        self._check_room(self.store.make_room(size + ahead_bytes, due))
        flight.num_bytes = size
        return missing

    def _write(self, flight: _Flight, part: Pages, data: memoryview) -> None:
        flight.num_bytes -= count_pages(part) * PAGE_BYTES
        self._check_room(self.store.write(flight.want.key, part, data, flight.want.due))

    def _check_room(self, is_enough: bool) -> None:
        if not is_enough:
            raise ResourceError(
                f"{self.store.folder.path}: the mirror has no room for the pages that are needed now\n"
                "free space, lower `reserve`, or raise `mirror.size`"
            )

    def _land(self, flight: _Flight, task: asyncio.Task[None]) -> None:
        """Forget a fetch that has ended."""
        if not task.cancelled():
            task.exception()  # retrieved, since perhaps no call awaits it any longer
        portion = _portion_of(flight.want.key, flight.want.pages)
        flights = self._flights[portion]
        flights.remove(flight)
        if not flights:
            del self._flights[portion]

    async def read_held(self, want: Want) -> tuple[Pages, bytes]:
        """Read the pages of a want that are held and whose checksums are correct.

        Returns: these pages, and their bytes one page after another.
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
    """Return whether pages are due too soon to wait for an unreachable node to come back."""
    return due < time.monotonic() + SOON_SECONDS


def _portion_of(key: FileKey, pages: Pages) -> tuple[str, int]:
    """Return the digest of the file, and the number of the portion that contains all of `pages`."""
    return key.digest, int(pages.blocks[0]) // PORTION_BLOCKS
