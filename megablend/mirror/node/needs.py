"""The needs of a node process's clients, whose pages are fetched and kept as they are due."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, MutableSet, Sequence
from dataclasses import dataclass, field

import numpy as np

from megablend.errors import MegablendError, ResourceError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import (
    PAGE_BYTES,
    PORTION_BLOCKS,
    Pages,
    add_pages,
    count_bytes,
    count_each,
    merge_rows,
    split_portions,
)
from megablend.mirror.disk.room import PAST_SECONDS, Need, concatenate
from megablend.mirror.node.engine import SOON_SECONDS, AwayError, Engine, Want
from megablend.storage.hints import Filled
from megablend.system.limited_log import LimitedLog

_PAUSE_SECONDS = 0.2
"""Least time between two changes of all due times, which is work for each row."""
_NUM_FETCHERS = 16
_LEAD_SHARE = 32
"""At most 1/32 of the held bytes are of pages that were fetched ahead and displaced others."""
_MIN_GRACE_SECONDS = 0.5
"""Least time from its due time until a page counts as read, if the mirror is small."""
_RETRY_SECONDS = 1.0
"""Pause before a fetch is tried again that found no room, or whose node was unreachable."""


@dataclass(eq=False)
class Needs:
    """Merges the needs of clients, and fetches ahead in the order in which they are due.

    After each change the needs are divided anew into a list of parts (see `order_by_due`), whose
    fetchers replace those of the earlier list. What these have begun to fetch goes on.
    """

    engine: Engine
    announce: Callable[[Sequence[Need]], Awaitable[None]] | None = None
    """Called with the needs of all clients after they have changed."""
    select: Callable[[Need], Awaitable[Need]] | None = None
    """Returns the part of a need that this node should hold; None if it should hold all of it."""
    _of_clients: dict[str, Sequence[Need]] = field(default_factory=dict)
    _of_nodes: dict[str, Sequence[Need]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_announced: bool = True
    """Whether `announce` was called since the last change."""
    _fetching: asyncio.Task[None] | None = None
    """Fetches the parts of the present list; None before the first one."""
    _retry_at: dict[tuple[FileKey, int], float] = field(default_factory=dict)
    """The times before which parts whose fetch has failed are not tried again, even if the list is
    replaced meanwhile, by file and first block."""
    _has_parts: bool = False
    """Whether the list has parts that no fetcher has taken yet."""
    _num_fetching: int = 0
    _grace: float = PAST_SECONDS
    _log: LimitedLog = field(default_factory=LimitedLog)

    def set(self, client: str, needs: Sequence[Need]) -> None:
        """Replace the needs of a client."""
        _replace(self._of_clients, client, needs)
        self.announce_again()

    def set_of_node(self, node: str, needs: Sequence[Need], *, is_more: bool = False) -> None:
        """Replace the needs of another node, or add to them if `is_more`. Their pages are kept by
        their due times, but not fetched before the node requests them."""
        _replace(
            self._of_nodes, node, [*self._of_nodes.get(node, []), *needs] if is_more else needs
        )
        self._changed.set()

    @property
    def is_fetching(self) -> bool:
        """Whether a page is being fetched ahead, or will be."""
        return self._has_parts or self._num_fetching > 0

    def list_needed(self) -> dict[FileKey, Pages]:
        """Return all pages that clients or other nodes need."""
        needed: dict[FileKey, Pages] = {}
        for needs in [*self._of_clients.values(), *self._of_nodes.values()]:
            for need in needs:
                add_pages(needed, need.key, need.pages)
        return needed

    def announce_again(self) -> None:
        """Announce the needs to other nodes again, since some may not have heard of them."""
        self._is_announced = False
        self._changed.set()

    async def run(self) -> None:
        """Fetch ahead until cancelled."""
        announcing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                own = [need for needs in self._of_clients.values() for need in needs]
                parts = await self._apply(own)
                if self._fetching is not None:
                    self._fetching.cancel()
                now = time.monotonic()
                self._retry_at = {name: at for name, at in self._retry_at.items() if at > now}
                self._has_parts = True
                self._fetching = asyncio.ensure_future(self._fetch_all(parts))
                # Not after changes by other nodes, or all would announce to one another for ever
                if self.announce is not None and not self._is_announced:
                    self._is_announced = True
                    # Not awaited: a silent node must not delay this loop. A later call replaces it
                    announcing.cancel()
                    announcing = asyncio.ensure_future(self.announce(own))
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            for task in (self._fetching, announcing):
                if task is not None:
                    task.cancel()

    async def _apply(self, own: list[Need]) -> Iterator[Want]:
        """Replace the store's due times. Returns: the list of parts, of the clients' needs only."""
        of_nodes = [need for needs in self._of_nodes.values() for need in needs]
        usage = await self.engine.call(self.engine.store.usage)
        lead = await asyncio.to_thread(find_lead, own, usage.num_bytes // _LEAD_SHARE)
        self.engine.lead = lead
        self._grace = min(PAST_SECONDS, max(_MIN_GRACE_SECONDS, lead))
        await self.engine.call(self.engine.store.set_due, own + of_nodes, self._grace)
        return await asyncio.to_thread(order_by_due, own)

    async def _fetch_all(self, parts: Iterator[Want]) -> None:
        """Fetch parts in their order, and those whose fetch failed after all others."""
        put_off = list[Want]()
        refused = set[float]()

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

    async def _fetch(self, part: Want, refused: MutableSet[float]) -> bool:
        """Fetch a part, as soon as there is room for it and for earlier ones, unless it was due so
        long ago that it counts as read.

        Args:
            refused: due times of parts for which there is no room at present.

        Returns: False if the fetch failed, and has to be tried again.
        """
        name = (part.key, int(part.pages.blocks[0]))
        while part.due >= time.monotonic() - self._grace:
            if time.monotonic() < self._retry_at.get(name, 0.0):  # it failed in an earlier list
                return False
            if not any(due < part.due for due in refused):
                refused.discard(part.due)
                try:
                    await self._obtain(part)
                    return True
                except ResourceError:
                    refused.add(part.due)
                except AwayError:
                    self._retry_at[name] = time.monotonic() + _RETRY_SECONDS
                    return False
                except Exception as error:
                    fault = None if isinstance(error, MegablendError) else error
                    self._log.warn("cannot fetch ahead", str(error), fault)
                    self._retry_at[name] = time.monotonic() + _RETRY_SECONDS
                    await asyncio.sleep(_RETRY_SECONDS)
                    return False
            await asyncio.sleep(_RETRY_SECONDS)
        return True

    async def _obtain(self, part: Want) -> None:
        self._num_fetching += 1
        try:
            await self.engine.obtain(part)
        finally:
            self._num_fetching -= 1

    async def fill(self, needs: Sequence[Need], *, is_dry: bool) -> Filled:
        """Fetch now the pages of needs that this node should hold, regardless of when they are due,
        or only count their bytes if `is_dry`."""
        own = needs if self.select is None else [await self.select(need) for need in needs]
        filled = Filled()
        portions = list[Want]()
        for need in own:
            if not need.pages:
                continue
            pages = merge_rows(need.pages)
            missing = await self.engine.call(self.engine.store.missing, need.key, pages)
            filled = filled.plus(
                Filled(
                    needed=count_bytes(pages, need.key.size),
                    missing=count_bytes(missing, need.key.size),
                )
            )
            portions += [Want(need.key, portion) for portion in split_portions(missing)]
        if is_dry:
            return filled
        remaining = iter(portions)

        async def fetch() -> None:
            nonlocal filled
            for portion in remaining:
                fetched = await self._fill_portion(portion)
                filled = filled.plus(fetched)

        await asyncio.gather(*(fetch() for _ in range(_NUM_FETCHERS)))
        return filled

    async def _fill_portion(self, portion: Want) -> Filled:
        try:
            origins = await self.engine.obtain(portion)
        except ResourceError:
            return Filled(refused=count_bytes(portion.pages, portion.key.size))
        return Filled(source=origins.source, peers=origins.peers)


def find_lead(needs: Sequence[Need], size: int) -> float:
    """Return in how many seconds `size` bytes of needs will be due; at most SOON_SECONDS."""
    if not needs:
        return SOON_SECONDS
    rows, due_at = concatenate(needs)
    due = due_at - time.monotonic()
    coming = np.flatnonzero((due >= 0) & (due < SOON_SECONDS))
    ordered = coming[np.argsort(due[coming])]
    sizes = PAGE_BYTES * count_each(rows.masks[ordered])
    row = int(np.searchsorted(np.cumsum(sizes), size))
    return float(due[ordered[row]]) if row < len(ordered) else SOON_SECONDS


def order_by_due(needs: Sequence[Need]) -> Iterator[Want]:
    """Divide needs into parts, each of one portion and due within the same second, in the order in
    which they are due. Pages without a due time are left out."""
    if not needs:
        return iter(())
    counts = [len(need.pages.blocks) for need in needs]
    need_index = np.repeat(np.arange(len(needs), dtype=np.uint32), counts)
    all_pages, due = concatenate(needs)
    # Whole seconds, so that parts are larger: a second more or less does not matter
    seconds = np.floor(due)
    order = np.lexsort((all_pages.blocks, need_index, seconds))
    order = order[: np.searchsorted(seconds[order], math.inf)]
    portions = all_pages.blocks[order] // PORTION_BLOCKS
    begins_part = np.diff(seconds[order]) > 0
    begins_part |= np.diff(need_index[order]) != 0
    begins_part |= np.diff(portions) != 0
    stops = [*(np.flatnonzero(begins_part) + 1).tolist(), len(order)]

    def parts() -> Iterator[Want]:
        begin = 0
        for stop in stops:
            rows = order[begin:stop]
            begin = stop
            if len(rows):
                key = needs[need_index[rows[0]]].key
                yield Want(key, merge_rows(all_pages.at(rows)), float(due[rows].min()))

    return parts()


def _replace(needs: dict[str, Sequence[Need]], name: str, new: Sequence[Need]) -> None:
    if new:
        needs[name] = new
    else:
        needs.pop(name, None)
