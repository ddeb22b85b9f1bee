"""Fetches pages in advance, before ranks read them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from megablend.errors import MegablendError, ResourceError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.room import PAST_SECONDS
from megablend.mirror.node.engine import AwayError, Engine, Want
from megablend.system.limited_log import LimitedLog

_NUM_FETCHERS = 16
_RETRY_SECONDS = 1.0
"""Seconds after which a failed fetch is repeated. It may have failed because there was no room, or
because a node was unreachable."""


@dataclass(eq=False)
class FetchAhead:
    """Fetches a list of parts in the order of their due times. Another list may replace it at any
    time. Fetches that have already begun are still finished.

    If there is no room for a part, this part and all later parts wait, since a later part must not
    take its room. A part whose fetch fails is postponed until all others have been tried.
    """

    engine: Engine
    _task: asyncio.Task[None] | None = None
    """The task that fetches the present list; None before the first list."""
    _grace: float = PAST_SECONDS
    """Seconds between the due time of a part and the time at which it is treated as read."""
    _has_parts: bool = False
    """Whether the list has parts that no fetcher has taken yet."""
    _num_fetching: int = 0
    _retry_at: dict[tuple[FileKey, int], float] = field(default_factory=dict)
    """The monotonic times before which failed parts are not tried again, by file and first block.
    They are kept when the list is replaced."""
    _log: LimitedLog = field(default_factory=LimitedLog)

    @property
    def is_fetching(self) -> bool:
        """Whether any parts are being fetched, or are still to be fetched. Postponed parts do not
        count."""
        return self._has_parts or self._num_fetching > 0

    def replace(self, parts: Iterator[Want], grace: float) -> None:
        """Replace the list of parts to fetch.

        Args:
            parts: the parts, sorted by due time.
            grace: the number of seconds between the due time of a part and the time at which it is
                treated as read.
        """
        self.stop()
        now = time.monotonic()
        self._retry_at = {name: at for name, at in self._retry_at.items() if at > now}
        self._grace = grace
        self._has_parts = True
        self._task = asyncio.ensure_future(self._fetch_all(parts))

    def stop(self) -> None:
        """Stop fetching."""
        if self._task is not None:
            self._task.cancel()

    async def _fetch_all(self, parts: Iterator[Want]) -> None:
        put_off = list[Want]()
        refused: set[float] = set()

        async def fetch() -> None:
            for part in parts:
                if not await self._fetch(part, refused):
                    put_off.append(part)
            self._has_parts = False
            while put_off:
                part = put_off.pop(0)
                await asyncio.sleep(_RETRY_SECONDS)
                if not await self._fetch(part, refused):
                    put_off.append(part)

        await asyncio.gather(*(fetch() for _ in range(_NUM_FETCHERS)))

    async def _fetch(self, part: Want, refused: set[float]) -> bool:
        """Wait until there is room for a part and for all earlier parts. Then fetch the part,
        unless it is treated as read by then.

        Args:
            refused: the due times of parts for which there is no room at present.

        Returns: False if the fetch failed and has to be repeated.
        """
        while part.due >= time.monotonic() - self._grace:
            if time.monotonic() < self._retry_at.get(_name_of(part), 0.0):
                return False  # it failed in an earlier list
            if not any(due < part.due for due in refused):
                refused.discard(part.due)
                try:
                    return await self._obtain(part)
                except ResourceError:
                    refused.add(part.due)
            await asyncio.sleep(_RETRY_SECONDS)
        return True

    async def _obtain(self, part: Want) -> bool:
        """Fetch a part now. Returns: False if the fetch failed. Raises: ResourceError if there is
        no room for the part."""
        pause = 0.0
        self._num_fetching += 1
        try:
            await self.engine.obtain(part)
            return True
        except ResourceError:
            raise
        except AwayError:
            pass  # parts of other nodes can be fetched at once
        except Exception as error:
            fault = None if isinstance(error, MegablendError) else error
            self._log.warn("cannot fetch data in advance", str(error), fault)
            pause = _RETRY_SECONDS
        finally:
            self._num_fetching -= 1
        self._retry_at[_name_of(part)] = time.monotonic() + _RETRY_SECONDS
        await asyncio.sleep(pause)
        return False


def _name_of(part: Want) -> tuple[FileKey, int]:
    return part.key, int(part.pages.blocks[0])
