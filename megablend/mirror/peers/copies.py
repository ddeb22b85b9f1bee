"""Copies pages that this node must hold from other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megablend.errors import DataError, MegablendError, ResourceError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import Pages, add_pages, count_bytes, split_portions, subtract
from megablend.mirror.disk.room import Need
from megablend.mirror.node.engine import AwayError, Engine, Mode, Want
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.placement import Placement
from megablend.system.limited_log import LimitedLog

_NUM_COPIERS = 4
_RETRY_SECONDS = 60.0


class Copies:
    """The pages that this node has yet to copy from other nodes, and the task that copies them.

    Args:
        engine: fetches and holds this node's pages.
        placement: knows which pages this node must hold.
        holders: knows which pages other nodes hold.
    """

    def __init__(self, engine: Engine, placement: Placement, holders: Holders) -> None:
        self._engine = engine
        self._placement = placement
        self._holders = holders
        self._to_copy: dict[FileKey, Pages] = {}
        self._to_copy_later: dict[FileKey, Pages] = {}
        """The pages that could not be copied, because the nodes that hold them are unreachable or
        this node's disk fails."""
        self._has_work = asyncio.Event()
        self.num_copying = 0
        self._log = LimitedLog()

    async def note_announced(self, needs: Sequence[Need]) -> None:
        """Schedule copies of the announced pages that this node must also hold."""
        for need in self._placement.select_own(needs):
            missing = await self._engine.call(self._engine.store.missing, need.key, need.pages)
            if missing:
                add_pages(self._to_copy, need.key, missing)
                self._has_work.set()

    def count_bytes(self) -> int:
        """Return the total size in bytes of the pages that have yet to be copied."""
        to_copy = [*self._to_copy.items(), *self._to_copy_later.items()]
        return sum(count_bytes(pages, key.size) for key, pages in to_copy)

    def retry(self) -> None:
        """Try again to copy the pages that could not be copied: a node may be reachable again."""
        for key, pages in self._to_copy_later.items():
            add_pages(self._to_copy, key, pages)
            self._has_work.set()
        self._to_copy_later = {}

    async def run(self) -> None:
        """Copy pages, until cancelled."""
        tasks = [asyncio.ensure_future(self._copy_portions()) for _ in range(_NUM_COPIERS)]
        tasks.append(asyncio.ensure_future(self._retry_regularly()))
        try:
            await asyncio.gather(*tasks)
        finally:  # if one task fails, the others continue
            for task in tasks:
                task.cancel()

    async def _retry_regularly(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            self.retry()

    async def _copy_portions(self) -> None:
        """Copy pages portion by portion, until cancelled."""
        while True:
            await self._has_work.wait()
            key = next(iter(self._to_copy), None)
            if key is None:
                self._has_work.clear()
                continue
            pages = self._to_copy.pop(key)
            portion, *rest = split_portions(pages)
            if rest:
                self._to_copy[key] = subtract(pages, portion)
            self.num_copying += 1
            try:
                await self._engine.obtain(Want(key, portion, mode=Mode.COPY))
            except ResourceError:
                pass  # no room here; the node that announced the pages holds them
            except (AwayError, MegablendError) as error:
                if isinstance(error, MegablendError):
                    self._log.warn("cannot keep a copy", str(error))
                # A node that holds them may come back, and a disk that fails may be mended; other
                # pages are copied in the meantime
                if isinstance(error, AwayError | DataError) and self._holders.find(key, portion):
                    add_pages(self._to_copy_later, key, portion)
            finally:
                self.num_copying -= 1
