"""What the clients of a node process need, and when: it is fetched in this order, and kept by it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from megablend.errors import DataError, MegablendError, ResourceError
from megablend.mirror.disk.pages import BLOCK_BYTES, PIECE_BYTES, Pages
from megablend.mirror.disk.room import DueRows
from megablend.mirror.node.engine import Engine
from megablend.mirror.node.frames import Need
from megablend.system.log import LOG

_PAUSE_SECONDS = 0.2
"""Between two changes of all due times, which is work for each row."""
_MAX_FETCHES = 16
"""Parts of pieces that are fetched ahead at a time."""
_BLOCKS_PER_PIECE = PIECE_BYTES // BLOCK_BYTES


class Needs:
    """Merges the needs of clients, and fetches ahead what is due first.

    Args:
        engine: gets the pages.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._needs: dict[str, Sequence[Need]] = {}
        self._changed = asyncio.Event()
        self._fetching = set[asyncio.Task[None]]()

    def set(self, client: str, needs: Sequence[Need]) -> None:
        """What a client needs, instead of what it said before."""
        if needs or client in self._needs:
            self._needs[client] = needs
            if not needs:
                del self._needs[client]
            self._changed.set()

    async def run(self) -> None:
        """Fetch ahead until cancelled."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                everything = [need for needs in self._needs.values() for need in needs]
                rows = [DueRows(key.digest, *pages, due) for key, pages, due in everything]
                await self._engine.call(self._engine.store.set_due, rows)
                await self._fetch(order_by_due(everything))
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            for each in self._fetching:
                each.cancel()

    async def _fetch(self, parts: Sequence[Need]) -> None:
        """Fetch parts one after another, several at a time, until something has changed."""
        for part in parts:
            if self._changed.is_set():
                return
            while len(self._fetching) >= _MAX_FETCHES:
                await asyncio.wait(self._fetching, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.ensure_future(self._fetch_part(part))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)

    async def _fetch_part(self, part: Need) -> None:
        try:
            await self._engine.obtain(part.key, part.pages, float(part.due.min()))
        except ResourceError:
            # Nor is there room for what is due later
            await self._changed.wait()
        except (DataError, MegablendError) as error:
            LOG.warning("mirror: not fetched ahead: %s", error)
            await asyncio.sleep(1.0)


def order_by_due(needs: Sequence[Need]) -> list[Need]:
    """Divide needs into parts of one piece each whose pages are due at about the same time: those
    that are due first come first. What is never due is left out."""
    parts = list[tuple[float, Need]]()
    for key, pages, due in needs:
        order = np.lexsort((pages.blocks, due))
        order = order[due[order] < math.inf]
        pieces = pages.blocks[order] // _BLOCKS_PER_PIECE
        # A second more or less decides nothing
        seconds = np.floor(due[order])
        for some in np.split(order, np.flatnonzero(np.diff(pieces) | (np.diff(seconds) > 0)) + 1):
            if len(some):
                blocks, at = np.unique(pages.blocks[some], return_inverse=True)
                masks = np.zeros(len(blocks), np.uint64)
                np.bitwise_or.at(masks, at, pages.masks[some])
                first = np.full(len(blocks), math.inf)
                np.minimum.at(first, at, due[some])
                parts.append((float(first.min()), Need(key, Pages(blocks, masks), first)))
    parts.sort(key=lambda each: each[0])
    return [part for _, part in parts]
