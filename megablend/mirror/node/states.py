"""Finds the states of source files, which are requested once for all ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from megablend.errors import DataError, MissingFileError
from megablend.mirror.disk.database import SourceState
from megablend.mirror.node.engine import Engine
from megablend.mirror.node.source_reads import SourceReader
from megablend.storage.base import FileStat
from megablend.system.log import LOG

FRESH_SECONDS = 600.0
"""Seconds for which the state of a file is used before it is requested again."""
_SILENT_SECONDS = 30.0
"""Seconds during which requests do not wait again for a source that did not respond. A job may open
thousands of files, and each of them would have to wait."""


@dataclass(eq=False)
class States:
    """A lookup of the states of files: in the store, in listings, and at the source."""

    engine: Engine
    source: SourceReader
    find_listed: Callable[[str], Awaitable[SourceState | None]]
    """Returns the state of a file according to the listings of datasets; None if it is unknown."""
    wait_seconds: float = 5.0
    """Seconds to wait for the source if an older state of the file is known."""
    _requests: dict[str, asyncio.Task[FileStat]] = field(default_factory=dict)
    _silent_until: dict[str, float] = field(default_factory=dict)
    """For each source (`scheme://server`), the time until which older states are used without
    waiting."""

    async def get(self, location: str) -> FileStat:
        """Return the state of a file. It is at most FRESH_SECONDS old if the source responds.

        Raises: the same errors as Storage.stat.
        """
        stored = await self.engine.call(self.engine.store.states.get, location)
        # If the stored state is outdated, it has to be requested again, whatever the listings say
        is_outdated = stored is not None and not stored.checked_at
        listed = None if is_outdated else await self.find_listed(location)
        states = [state for state in (stored, listed) if state is not None]
        known = max(states, key=lambda state: state.checked_at, default=None)
        if known is None:
            return await self._request(location)
        stat = FileStat(size=known.size, etag=known.etag)
        source = _source_of(location)
        is_fresh = 0 <= time.time() - known.checked_at < FRESH_SECONDS
        is_silent = time.monotonic() < self._silent_until.get(source, 0.0)
        if is_fresh or (is_silent and not is_outdated):
            return stat
        try:
            return await asyncio.wait_for(self._request(location), self.wait_seconds)
        except MissingFileError:
            raise
        except (DataError, asyncio.TimeoutError) as error:
            if isinstance(error, asyncio.TimeoutError):
                self._silent_until[source] = time.monotonic() + _SILENT_SECONDS
            LOG.warning(
                "mirror: the source of %s is not responding; assuming that its files are unchanged",
                location,
            )
            return stat

    async def _request(self, location: str) -> FileStat:
        """Request the state of a file from the source, or await a request in progress."""
        request = self._requests.get(location)
        if request is None:
            request = asyncio.ensure_future(self._ask(location))
            self._requests[location] = request
            request.add_done_callback(lambda _: self._requests.pop(location, None))
        return await asyncio.shield(request)

    async def _ask(self, location: str) -> FileStat:
        state = await self.source.stat(location)
        self._silent_until.pop(_source_of(location), None)
        await self.remember(location, state)
        return state

    async def remember(self, location: str, stat: FileStat) -> None:
        """Store the present state of a file. Raises: ConfigError if the file may not be read."""
        self.source.check_allowed(location)
        state = SourceState(stat.size, stat.etag, time.time())
        await self.engine.call(self.engine.store.states.put, location, state)


def _source_of(location: str) -> str:
    """Return the source of a location: `scheme://server`, or the first folders of a path."""
    return "/".join(location.split("/", 3)[:3])
