"""Gets pages for whoever asks, each of them once at a time, and stores them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megablend.errors import ChangedFileError, DataError, MissingFileError, ResourceError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.page_store import PageStore
from megablend.mirror.disk.pages import Pages, intersect, subtract
from megablend.mirror.node.source_reads import SourceReader
from megablend.storage.base import FileStat
from megablend.system.log import LOG

T = TypeVar("T")
FRESH_SECONDS = 600.0
"""For so long a file's state is not asked for again."""
_STATE_SECONDS = 5.0
"""A source that is not heard of for so long is not waited for where an older state is known."""


@dataclass(slots=True, eq=False)
class _Flight:
    """Pages that are on their way."""

    pages: Pages
    task: asyncio.Task[None]


class Engine:
    """All that a node process does with pages and states of files.

    Args:
        store: the folder; used by one thread.
        source: reads the source.
    """

    def __init__(self, store: PageStore, source: SourceReader) -> None:
        self.store = store
        self.source = source
        self._disk = ThreadPoolExecutor(1, "megablend-disk")
        self._flights: dict[str, list[_Flight]] = {}
        self._asking: dict[str, asyncio.Task[FileStat]] = {}

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the store in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, function, *arguments)

    async def obtain(self, key: FileKey, pages: Pages, due: float) -> None:
        """Return when the pages were held, all of them.

        Args:
            due: seconds of the monotonic clock.

        Raises: as Storage.read does; ResourceError if there is no room for them.
        """
        missing = await self.call(self.store.missing, key, pages)
        if not len(missing.blocks):
            await self.call(self.store.touch, key, pages)
            return
        flights = self._flights.setdefault(key.digest, [])
        waits = list[asyncio.Task[None]]()
        for flight in flights:
            if len(intersect(missing, flight.pages).blocks):
                waits.append(flight.task)
                missing = subtract(missing, flight.pages)
        if len(missing.blocks):
            task = asyncio.ensure_future(self._fetch(key, missing, due))
            flight = _Flight(missing, task)
            flights.append(flight)
            task.add_done_callback(partial(self._land, key.digest, flight))
            waits.append(task)
        for each in waits:
            # Others wait for it, too
            await asyncio.shield(each)

    async def _fetch(self, key: FileKey, pages: Pages, due: float) -> None:
        async def keep(part: Pages, data: memoryview) -> None:
            if not await self.call(self.store.write, key, part, data, due):
                raise ResourceError(
                    f"{self.store.folder.path}: the mirror has no room for what is needed now\n"
                    "free space, lower `reserve`, or raise `size` of `mirror`"
                )

        try:
            await self.source.read(key, pages, keep)
        except ChangedFileError:
            # What is known of the file is too old
            if (known := await self.call(self.store.get_state, key.location)) is not None:
                await self.call(self.store.put_state, key.location, known[0], known[1], 0.0)
            raise

    def _land(self, digest: str, flight: _Flight, _: asyncio.Task[None]) -> None:
        flights = self._flights[digest]
        flights.remove(flight)
        if not flights:
            del self._flights[digest]

    async def distrust(self, key: FileKey, pages: Pages) -> None:
        """Get pages again that do not match a checksum: from the source."""
        await self.call(self.store.drop, key, pages)
        LOG.warning(
            "mirror: %s: bytes of %s were wrong; getting them from the source",
            self.store.folder.path,
            key.location,
        )

        async def keep(part: Pages, data: memoryview) -> None:
            await self.call(self.store.write, key, part, data, time.monotonic())

        missing = await self.call(self.store.missing, key, pages)
        await self.source.read(key, missing, keep)

    async def stat(self, location: str) -> FileStat:
        """The state of a file, not older than FRESH_SECONDS if the source answers.

        Raises: as Storage.stat does.
        """
        known = await self.call(self.store.get_state, location)
        if known is not None and 0 <= time.time() - known[2] < FRESH_SECONDS:
            return FileStat(size=known[0], etag=known[1])
        task = self._asking.get(location)
        if task is None:
            task = asyncio.ensure_future(self._ask(location))
            self._asking[location] = task
            task.add_done_callback(lambda _: self._asking.pop(location, None))
        if known is None:
            return await asyncio.shield(task)
        try:
            return await asyncio.wait_for(asyncio.shield(task), _STATE_SECONDS)
        except MissingFileError:
            raise
        except (DataError, asyncio.TimeoutError):
            LOG.warning(
                "mirror: the source of %s does not answer; taking it to be as it was", location
            )
            return FileStat(size=known[0], etag=known[1])

    async def _ask(self, location: str) -> FileStat:
        state = await self.source.stat(location)
        await self.note_state(location, state)
        return state

    async def note_state(self, location: str, state: FileStat) -> None:
        """A file has this state now."""
        self.source.check_allowed(location)
        await self.call(self.store.put_state, location, state.size, state.etag, time.time())

    async def close(self) -> None:
        """Make all durable, and close the folder."""
        for flights in self._flights.values():
            for flight in list(flights):
                flight.task.cancel()
        await self.call(self.store.sync)
        await self.call(self.store.close)
