"""The holders of pages: nodes announce their pages to one another.

A node announces its pages of a piece to the piece's homes, and to the next node in the piece's
order: all held pages when the nodes meet, then each page that it gets. So a home knows which nodes
hold the pages that it lacks: after its own disk was replaced, after the list of nodes has changed,
or if another node had to read the source. It copies the pages that it must hold, and reads from the
source only those that no node has announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import MegablendError, ResourceError
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import (
    NO_PAGES,
    PIECE_BLOCKS,
    Pages,
    add_pages,
    count_bytes,
    intersect,
    split_portions,
    subtract,
)
from megablend.mirror.disk.room import Need
from megablend.mirror.members.homes import Homes
from megablend.mirror.node.engine import AwayError, Engine, Mode, Want
from megablend.system.log import LOG

_NUM_COPIERS = 4
_RETRY_SECONDS = 60.0
_MAX_ORDERS = 4096
"""The number of pieces whose orders are cached, since a piece is requested in many parts."""


class Holders:
    """The pages that other nodes hold, those that this node has yet to announce to them, and those
    that it has yet to copy from them.

    Args:
        engine: reads and holds this node's pages.
        names: the names of all nodes, sorted.
        own: this node's name.
        copies: the number of nodes that must hold each page.
    """

    def __init__(self, engine: Engine, names: Sequence[str], own: str, copies: int) -> None:
        self._engine = engine
        self._names = names
        self._own = own
        self.copies = min(copies, len(names))
        self._homes = Homes(names)
        self._ordered = lru_cache(_MAX_ORDERS)(self._homes.order_names)
        self._unannounced: dict[str, dict[FileKey, Pages]] = {
            name: {} for name in names if name != own
        }
        """The pages that each other node has yet to be notified of."""
        self.news = {name: asyncio.Event() for name in self._unannounced}
        """For each other node: set while it has yet to be notified of pages."""
        self._held_at_start: dict[str, list[Need]] | None = None
        """For each other node that has not got its first announcement: the pages for it, which were
        held when the nodes met. None before the store was searched."""
        self._searching = asyncio.Lock()
        self._announced: dict[FileKey, dict[str, Pages]] = {}
        """The pages of each file that each other node has announced."""
        self._to_copy: dict[FileKey, Pages] = {}
        self._to_copy_later: dict[FileKey, Pages] = {}
        """Pages to copy when a node that holds them is back."""
        self._has_work = asyncio.Event()
        self._num_copying = 0
        self.successor: Holders | None = None
        """The holders of the next view, to whose nodes new pages are also announced."""

    def order(self, key: FileKey, piece: int, count: int) -> list[str]:
        """Return the first `count` nodes in the order of a piece; the first of them is its home."""
        return self._ordered(key.digest, piece, count)

    def count_debts(self) -> dict[str, int]:
        """Return numbers for people and metrics: the copies of each page, the bytes that this node
        has yet to copy, the copies under way, and the nodes that have yet to be notified of
        pages."""
        to_copy = [*self._to_copy.items(), *self._to_copy_later.items()]
        return {
            "copies": self.copies,
            "bytes_to_copy": sum(count_bytes(pages, key.size) for key, pages in to_copy),
            "copying": self._num_copying,
            "untold_nodes": sum(bool(pages) for pages in self._unannounced.values()),
        }

    def note_own(self, key: FileKey, pages: Pages, giver: str | None) -> None:
        """Record that this node got pages of one piece, from the node `giver` or from the source, to
        announce them."""
        order = self.order(key, int(pages.blocks[0]) // PIECE_BLOCKS, self.copies + 1)
        # The giver of a copy must know about the copy, to read it if its own pages are damaged
        keeps_copy = self._own in order[1 : self.copies]
        for name in order:
            if name != self._own and (name != giver or keeps_copy):
                add_pages(self._unannounced[name], key, pages)
                self.news[name].set()
        if self.successor is not None:
            self.successor.note_own(key, pages, giver)

    async def find_all(self, name: str) -> list[Need]:
        """Return all held pages of the pieces whose home another node is or may become. When the
        nodes meet, the store is searched once for all of them."""
        async with self._searching:
            if self._held_at_start is None:
                names = list(self._unannounced)
            elif name in self._held_at_start:
                return self._held_at_start.pop(name)
            else:
                names = [name]
            for each in names:
                self._unannounced[each] = {}
                self.news[each].clear()
            held = await self._engine.call(self._find_held, names)
            self._held_at_start = self._held_at_start or held
            return held.pop(name)

    def _find_held(self, names: Sequence[str]) -> dict[str, list[Need]]:
        """Return for each node the held pages of the pieces that have this node among their first
        `copies + 1` nodes. Called in the store's thread."""
        held: dict[str, list[Need]] = {name: [] for name in names}
        places = {self._names.index(name): name for name in names}
        for key in [*self._engine.store.keys()]:
            pages = self._engine.store.held(key)
            order = self._find_places(key, pages, self.copies + 1)
            for place in np.unique(order).tolist():
                if place in places:
                    its_pages = pages.at((order == place).any(axis=1))
                    held[places[place]].append(Need.of(key, its_pages))
        return held

    def _find_places(self, key: FileKey, pages: Pages, count: int) -> Int64s:
        """Return the first `count` nodes in the order of each block's piece: indices into the sorted
        names, int64 [blocks, count]."""
        return self._homes.order_blocks(key.digest, pages.blocks, count)

    def take_unannounced(self, name: str) -> list[Need]:
        """Take out the pages that have not been announced to a node; `put_back` restores them if
        the announcement fails."""
        unannounced = self._unannounced[name]
        self._unannounced[name] = {}
        self.news[name].clear()
        return [Need.of(key, pages) for key, pages in unannounced.items()]

    def put_back(self, name: str, needs: Sequence[Need]) -> None:
        """Restore pages that could not be announced to a node."""
        for key, pages, _ in needs:
            add_pages(self._unannounced[name], key, pages)
        self.news[name].set()

    async def note_announced(self, name: str, needs: Sequence[Need]) -> None:
        """Record that another node has announced pages. Those that this node must also hold will be
        copied."""
        for key, pages, _ in needs:
            add_pages(self._announced.setdefault(key, {}), name, pages)
            own = self.select_own(Need.of(key, pages)).pages
            own_missing = await self._engine.call(self._engine.store.missing, key, own)
            if own_missing:
                add_pages(self._to_copy, key, own_missing)
                self._has_work.set()

    def select_own(self, need: Need) -> Need:
        """Return the part of a need that this node is a home of."""
        place = self._names.index(self._own)
        places = self._find_places(need.key, need.pages, self.copies)
        return need.at((places == place).any(axis=1))

    def find_announced(self, key: FileKey, pages: Pages) -> list[tuple[str, Pages]]:
        """Return the nodes that announced some of the pages, each with the pages that it announced."""
        by_node = self._announced.get(key, {})
        common = [(name, intersect(pages, held)) for name, held in by_node.items()]
        return [(name, held) for name, held in common if held]

    def forget(self, name: str, key: FileKey, pages: Pages) -> None:
        """Record that a node does not hold pages that it announced."""
        by_node = self._announced.get(key, {})
        left = subtract(by_node.pop(name, NO_PAGES), pages)
        if left:
            by_node[name] = left
        elif not by_node:
            self._announced.pop(key, None)

    async def copy(self) -> None:
        """Copy the pages that this node must hold from other nodes, until cancelled."""
        tasks = [asyncio.ensure_future(self._copy_some()) for _ in range(_NUM_COPIERS)]
        tasks.append(asyncio.ensure_future(self._retry_regularly()))
        try:
            await asyncio.gather(*tasks)
        finally:  # the others go on if one fails
            for each in tasks:
                each.cancel()

    async def _retry_regularly(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            self.retry()

    async def _copy_some(self) -> None:
        """Copy one portion after another, until cancelled."""
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
            self._num_copying += 1
            try:
                await self._engine.obtain(Want(key, portion, mode=Mode.COPY))
            except AwayError:
                # A node that holds them may come back; other pages are copied in the meantime
                if self.find_announced(key, portion):
                    add_pages(self._to_copy_later, key, portion)
            except ResourceError:
                pass  # no room here; the node that announced the pages holds them
            except MegablendError as error:
                LOG.warning("mirror: cannot keep a copy: %s", error)
            finally:
                self._num_copying -= 1

    def retry(self) -> None:
        """Try again to copy the pages that could not be copied, since a node is back."""
        for key, pages in self._to_copy_later.items():
            add_pages(self._to_copy, key, pages)
            self._has_work.set()
        self._to_copy_later = {}

    def divide_by_home(self, needs: Sequence[Need]) -> Mapping[str, list[Need]]:
        """Divide needs by the homes of their pieces, and leave out those whose home is this
        node."""
        by_home: dict[str, list[Need]] = {}
        for need in needs:
            first = self._find_places(need.key, need.pages, 1)[:, 0]
            for place in np.unique(first).tolist():
                its_need = need.at(first == place)
                by_home.setdefault(self._names[place], []).append(its_need)
        by_home.pop(self._own, None)
        return by_home
