"""What the clients of a node process need, and when. Pages are fetched and kept in this order."""

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
    NO_PAGES,
    PAGE_BYTES,
    PORTION_BLOCKS,
    Pages,
    count_bytes,
    count_each,
    split_portions,
    unite,
)
from megablend.mirror.disk.room import PAST_SECONDS, Need
from megablend.mirror.node.engine import SOON_SECONDS, AwayError, Engine, Want
from megablend.storage.hints import Filled
from megablend.system.log import LOG

_PAUSE_SECONDS = 0.2
"""Least time between two changes of all due times, which is work for each row."""
_NUM_FETCHERS = 16
_LEAD_SHARE = 32
"""At most one in so many held bytes may be of pages that were fetched ahead, and displaced
others."""
_MIN_GRACE_SECONDS = 0.5
"""Least time after its due time until a page counts as read: in a mirror that is small for its
readers."""
_WARN_SECONDS = 10.0
_RETRY_SECONDS = 1.0
"""Pause before a fetch is tried again for which there was no room, or whose node was away."""


@dataclass(eq=False)
class Needs:
    """Merges the needs of clients, and fetches ahead in the order in which they are due."""

    engine: Engine
    tell: Callable[[Sequence[Need]], Awaitable[None]] | None = None
    """Called with the needs of all clients after they have changed."""
    select: Callable[[Need], Awaitable[Need]] | None = None
    """Returns the part of a need that this node is to hold; None if it is to hold all of it."""
    _needs: dict[str, Sequence[Need]] = field(default_factory=dict)
    _kept: dict[str, Sequence[Need]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_told: bool = True
    """Whether `tell` was called since the last change."""
    _has_parts: asyncio.Event = field(default_factory=asyncio.Event)
    _num_fetching: int = 0
    _parts: Iterator[Want] = field(default_factory=lambda: iter(()))
    _later: list[Want] = field(default_factory=list)
    _refused: MutableSet[float] = field(default_factory=set)
    """Due times of parts for which there is no room at present."""
    _turn: int = 0
    """Number of the present list of parts."""
    _grace: float = PAST_SECONDS
    _warned_at: float = -_WARN_SECONDS

    def set(self, client: str, needs: Sequence[Need]) -> None:
        """Replace what a client needs."""
        _replace(self._needs, client, needs)
        self.tell_again()

    def set_kept(self, node: str, needs: Sequence[Need], *, is_more: bool = False) -> None:
        """Replace what another node will request, or add to it if `is_more`. It is kept by its due
        times, but not fetched before it is requested."""
        _replace(self._kept, node, [*self._kept.get(node, []), *needs] if is_more else needs)
        self._changed.set()

    @property
    def is_fetching(self) -> bool:
        """Whether something is being fetched ahead, or is to be."""
        return self._has_parts.is_set() or self._num_fetching > 0

    def list_needed(self) -> dict[FileKey, Pages]:
        """All pages that clients or other nodes need."""
        found: dict[FileKey, Pages] = {}
        for needs in [*self._needs.values(), *self._kept.values()]:
            for need in needs:
                found[need.key] = unite(found.get(need.key, NO_PAGES), need.pages)
        return found

    def tell_again(self) -> None:
        """Tell other nodes the needs again, since some may not have heard of them."""
        self._is_told = False
        self._changed.set()

    async def run(self) -> None:
        """Fetch ahead until cancelled."""
        fetchers = [asyncio.ensure_future(self._fetch()) for _ in range(_NUM_FETCHERS)]
        loop = asyncio.get_running_loop()
        telling: asyncio.Future[None] = loop.create_future()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                own = [need for needs in self._needs.values() for need in needs]
                kept = [need for needs in self._kept.values() for need in needs]
                held = await self.engine.call(self.engine.store.usage)
                lead = await loop.run_in_executor(
                    None, find_lead, own, held.num_bytes // _LEAD_SHARE
                )
                self.engine.lead = lead
                self._grace = min(PAST_SECONDS, max(_MIN_GRACE_SECONDS, lead))
                await self.engine.call(self.engine.store.set_due, own + kept, self._grace)
                parts = await loop.run_in_executor(None, order_by_due, own)
                self._turn += 1
                self._parts = parts
                self._later = []
                self._refused = set()
                self._has_parts.set()
                # Not after changes by other nodes, or all would go on telling one another
                if self.tell is not None and not self._is_told:
                    self._is_told = True
                    # Not awaited: a silent node must not delay this loop. A later call replaces it
                    telling.cancel()
                    telling = asyncio.ensure_future(self.tell(own))
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            for each in (*fetchers, telling):
                each.cancel()

    async def fill(self, needs: Sequence[Need], *, is_dry: bool) -> Filled:
        """Fetch what this node is to hold of needs, whenever it is due, or only count it if
        `is_dry`."""
        own = needs if self.select is None else [await self.select(each) for each in needs]
        wanted = [_unite_rows(need, *need.sort()) for need in own if len(need.pages.blocks)]
        filled = Filled()
        portions = list[Want]()
        for want in wanted:
            missing = await self.engine.call(self.engine.store.missing, want.key, want.pages)
            filled = filled.plus(
                Filled(
                    needed=count_bytes(want.pages, want.key.size),
                    missing=count_bytes(missing, want.key.size),
                )
            )
            portions += [Want(want.key, part) for part in split_portions(missing)]
        if is_dry:
            return filled
        remaining = iter(portions)

        async def fetch() -> Filled:
            got = Filled()
            for want in remaining:
                got = got.plus(await self._fill_portion(want))
            return got

        for got in await asyncio.gather(*(fetch() for _ in range(_NUM_FETCHERS))):
            filled = filled.plus(got)
        return filled

    async def _fill_portion(self, want: Want) -> Filled:
        try:
            origins = await self.engine.obtain(want)
        except ResourceError:
            return Filled(refused=count_bytes(want.pages, want.key.size))
        return Filled(source=origins.source, peers=origins.peers)

    async def _fetch(self) -> None:
        """Fetch one part after another of the present list."""
        while True:
            part = next(self._parts, None)
            if part is None and self._later:
                # A pause, since these parts have been tried and put off
                await asyncio.sleep(_RETRY_SECONDS)
                # In the meantime there may be a new list, and nothing that was put off
                part = next(self._parts, None) or (self._later.pop(0) if self._later else None)
            if part is None:
                self._has_parts.clear()
                await self._has_parts.wait()
                continue
            turn = self._turn
            try:
                while (
                    turn == self._turn
                    and not self._is_over(part)
                    and not await self._try_fetch(part)
                ):
                    await asyncio.sleep(_RETRY_SECONDS)
                continue
            except AwayError:
                pass
            except Exception as error:
                if time.monotonic() - self._warned_at > _WARN_SECONDS:
                    self._warned_at = time.monotonic()
                    is_fault = not isinstance(error, MegablendError)
                    LOG.warning("mirror: cannot fetch ahead: %s", error, exc_info=is_fault)
                await asyncio.sleep(_RETRY_SECONDS)
            if turn == self._turn:
                self._later.append(part)
                self._has_parts.set()

    def _is_over(self, part: Want) -> bool:
        """Whether a part was due so long ago that it counts as read."""
        return part.due < time.monotonic() - self._grace

    async def _try_fetch(self, part: Want) -> bool:
        """Fetch a part, unless a part that is due earlier waits for room. Returns: False if there
        is no room for it yet."""
        if any(due < part.due for due in self._refused):
            return False
        self._refused.discard(part.due)
        self._num_fetching += 1
        try:
            await self.engine.obtain(part)
        except ResourceError:
            self._refused.add(part.due)
            return False
        finally:
            self._num_fetching -= 1
        return True


def find_lead(needs: Sequence[Need], size: int) -> float:
    """In how many seconds from now the first `size` bytes of needs are due; at most
    SOON_SECONDS."""
    now = time.monotonic()
    due = np.concatenate([np.empty(0), *(need.due for need in needs)]) - now
    masks = np.concatenate([np.empty(0, np.uint64), *(need.pages.masks for need in needs)])
    is_coming = (due >= 0) & (due < SOON_SECONDS)
    order = np.argsort(due[is_coming])
    sizes = PAGE_BYTES * count_each(masks[is_coming][order])
    reached = int(np.searchsorted(np.cumsum(sizes), size))
    return max(0.0, float(due[is_coming][order[reached]])) if reached < len(order) else SOON_SECONDS


def order_by_due(needs: Sequence[Need]) -> Iterator[Want]:
    """Divide needs into parts, each of one portion and due within the same second, in the order in
    which they are due. Pages without a due time are left out."""
    if not needs:
        return iter(())
    counts = [len(need.pages.blocks) for need in needs]
    need_index = np.repeat(np.arange(len(needs), dtype=np.uint32), counts)
    blocks = np.concatenate([need.pages.blocks for need in needs])
    masks = np.concatenate([need.pages.masks for need in needs])
    due = np.concatenate([need.due for need in needs])
    # Whole seconds, so that parts are larger: a second more or less does not matter
    seconds = np.floor(due)
    order = np.lexsort((blocks, need_index, seconds))
    order = order[: np.searchsorted(seconds[order], math.inf)]
    portions = blocks[order] // PORTION_BLOCKS
    is_first = np.diff(seconds[order]) > 0
    is_first |= np.diff(need_index[order]) != 0
    is_first |= np.diff(portions) != 0
    edges = [*(np.flatnonzero(is_first) + 1).tolist(), len(order)]

    def parts() -> Iterator[Want]:
        begin = 0
        for stop in edges:
            rows = order[begin:stop]
            begin = stop
            if len(rows):
                yield _unite_rows(needs[need_index[rows[0]]], blocks[rows], masks[rows], due[rows])

    return parts()


def _unite_rows(need: Need, blocks: np.ndarray, masks: np.ndarray, due: np.ndarray) -> Want:
    """Make one want of rows of a need, whose blocks are ascending and may repeat."""
    starts = np.flatnonzero(np.diff(blocks.astype(np.int64), prepend=-1))
    pages = Pages(blocks[starts], np.bitwise_or.reduceat(masks, starts))
    return Want(need.key, pages, float(due.min()))


def _replace(needs: dict[str, Sequence[Need]], name: str, new: Sequence[Need]) -> None:
    if new:
        needs[name] = new
    else:
        needs.pop(name, None)
