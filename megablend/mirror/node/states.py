"""What is known of the source's files: versions, which are asked for once for all ranks."""

from __future__ import annotations

import asyncio
import time

from megablend.errors import DataError, MissingFileError
from megablend.mirror.node.engine import Engine
from megablend.mirror.node.source_reads import SourceReader
from megablend.storage.base import FileStat
from megablend.system.log import LOG

FRESH_SECONDS = 600.0
"""For so long a file's state is not asked for again."""
_STATE_SECONDS = 5.0
"""A source that is not heard of for so long is not waited for where an older state is known."""


class States:
    """The states of source files, as they were last seen.

    Args:
        engine: whose folder remembers them.
        source: asked for them.
    """

    def __init__(self, engine: Engine, source: SourceReader) -> None:
        self._engine = engine
        self._source = source
        self._asking: dict[str, asyncio.Task[FileStat]] = {}

    async def get(self, location: str) -> FileStat:
        """The state of a file, not older than FRESH_SECONDS if the source answers.

        Raises: as Storage.stat does.
        """
        known = await self._engine.call(self._engine.store.get_state, location)
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
        state = await self._source.stat(location)
        await self.note(location, state)
        return state

    async def note(self, location: str, state: FileStat) -> None:
        """A file has this state now. Raises: ConfigError if it is not one that may be read."""
        self._source.check_allowed(location)
        await self._engine.call(
            self._engine.store.put_state, location, state.size, state.etag, time.time()
        )
