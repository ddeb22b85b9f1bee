"""Which nodes hold what: they tell one another.

A node tells the homes of a piece, and the one after them, which pages of it it holds: all of them
when they meet, then those that it gets. So a home knows who has what it lacks: after its own disk
was replaced, after the list of nodes has changed, and where somebody else had to read the source.
It copies what it is to hold, and asks the source only for what nobody has told of.
"""

from __future__ import annotations

import asyncio
import math
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
    count_bytes,
    intersect,
    split_portions,
    subtract,
    unite,
)
from megablend.mirror.disk.room import Need
from megablend.mirror.members.homes import Homes
from megablend.mirror.node.engine import AwayError, Engine, Mode, Want
from megablend.system.log import LOG

_NUM_COPIERS = 4
_RETRY_SECONDS = 60.0
_MOST_ORDERS = 4096


class Holders:
    """What this node owes to the others: to tell what it holds, and to hold copies.

    Args:
        engine: what this node holds.
        names: of all nodes, sorted.
        own: this node's.
        copies: how many nodes shall hold a page.
    """

    def __init__(self, engine: Engine, names: Sequence[str], own: str, copies: int) -> None:
        self._engine = engine
        self._names = names
        self._own = own
        self.copies = min(copies, len(names))
        self._homes = Homes(names)
        # A piece is asked for in many parts
        self._ordered = lru_cache(_MOST_ORDERS)(self._homes.order_names)
        self._untold: dict[str, dict[FileKey, Pages]] = {each: {} for each in names if each != own}
        self.news = {name: asyncio.Event() for name in self._untold}
        """Set while there is something to tell a node."""
        self._found: dict[str, list[Need]] | None = None
        """What was held when the nodes met, of those that have not been told yet."""
        self._searching = asyncio.Lock()
        self._known: dict[FileKey, dict[str, Pages]] = {}
        self._to_copy: dict[FileKey, Pages] = {}
        self._later: dict[FileKey, Pages] = {}
        """To be copied when who has it is back."""
        self._has_work = asyncio.Event()
        self._num_copying = 0
        self.successor: Holders | None = None
        """Those of the next view: what this node gets is told in it, too."""

    def order(self, key: FileKey, piece: int, count: int) -> list[str]:
        """The first nodes in the order of a piece: the first is its home."""
        return self._ordered(key.digest, piece, count)

    def count_debts(self) -> dict[str, int]:
        """For people and metrics: bytes of copies that this node is to get, and nodes to which it has
        something to tell."""
        parts = [*self._to_copy.items(), *self._later.items()]
        to_copy = sum(count_bytes(pages, key.size) for key, pages in parts)
        untold = sum(bool(each) for each in self._untold.values())
        return {
            "copies": self.copies,
            "bytes_to_copy": to_copy,
            "copying": self._num_copying,
            "untold_nodes": untold,
        }

    def note(self, key: FileKey, pages: Pages, giver: str | None) -> None:
        """This node has got pages of one piece: from that node, or from the source."""
        for name in self.order(key, int(pages.blocks[0]) // PIECE_BLOCKS, self.copies + 1):
            if name not in (self._own, giver):
                owed = self._untold[name]
                owed[key] = unite(owed.get(key, NO_PAGES), pages)
                self.news[name].set()
        if self.successor is not None:
            self.successor.note(key, pages, giver)

    async def find_all(self, name: str) -> list[Need]:
        """All that this node holds of pieces whose home the other one is, or may become. What is
        held is looked through once for all nodes when they meet."""
        async with self._searching:
            found = None if self._found is None else self._found.pop(name, None)
            if found is not None:
                return found
            names = list(self._untold) if self._found is None else [name]
            for each in names:
                self._untold[each] = {}
                self.news[each].clear()
            all_found = await self._engine.call(self._find_held, names)
            self._found = self._found or all_found
            return all_found.pop(name)

    def _find_held(self, names: Sequence[str]) -> dict[str, list[Need]]:
        """What is held, by the nodes that are among the first of its pieces."""
        found: dict[str, list[Need]] = {name: [] for name in names}
        places = {self._names.index(name): name for name in names}
        for key in [*self._engine.store.keys()]:
            pages = self._engine.store.held(key)
            order = self._find_places(key, pages, self.copies + 1)
            for place in np.unique(order).tolist():
                if (name := places.get(place)) is not None:
                    is_its = (order == place).any(axis=1)
                    some = Pages(pages.blocks[is_its], pages.masks[is_its])
                    found[name].append(Need.of(key, some, math.inf))
        return found

    def _find_places(self, key: FileKey, pages: Pages, count: int) -> Int64s:
        """The first nodes in the order of each block's piece: places, int64 [blocks, count]."""
        return self._homes.order_blocks(key.digest, pages.blocks, count)

    def take_untold(self, name: str) -> list[Need]:
        """What there is to tell a node; `put_back` if it could not be told."""
        owed = self._untold[name]
        self._untold[name] = {}
        self.news[name].clear()
        return [Need.of(key, pages, math.inf) for key, pages in owed.items()]

    def put_back(self, name: str, needs: Sequence[Need]) -> None:
        """What could not be told."""
        owed = self._untold[name]
        for key, pages, _ in needs:
            owed[key] = unite(owed.get(key, NO_PAGES), pages)
        self.news[name].set()

    async def hear(self, name: str, needs: Sequence[Need]) -> None:
        """Another node holds pages; those that this one is to hold are copied in its time."""
        for key, pages, _ in needs:
            by_node = self._known.setdefault(key, {})
            by_node[name] = unite(by_node.get(name, NO_PAGES), pages)
            own = self.select_own(Need.of(key, pages, math.inf)).pages
            own = await self._engine.call(self._engine.store.missing, key, own)
            if len(own.blocks):
                self._to_copy[key] = unite(self._to_copy.get(key, NO_PAGES), own)
                self._has_work.set()

    def select_own(self, need: Need) -> Need:
        """What this node is a home of."""
        key, pages, due = need
        place = self._names.index(self._own)
        is_own = (self._find_places(key, pages, self.copies) == place).any(axis=1)
        return Need(key, Pages(pages.blocks[is_own], pages.masks[is_own]), due[is_own])

    def find(self, key: FileKey, pages: Pages) -> list[tuple[str, Pages]]:
        """Nodes that have told that they hold some of the pages, and which."""
        found = [(name, intersect(pages, has)) for name, has in self._known.get(key, {}).items()]
        return [(name, some) for name, some in found if len(some.blocks)]

    def forget(self, name: str, key: FileKey, pages: Pages) -> None:
        """A node does not hold pages of which it has told."""
        by_node = self._known.get(key, {})
        left = subtract(by_node.pop(name, NO_PAGES), pages)
        if len(left.blocks):
            by_node[name] = left
        elif not by_node:
            self._known.pop(key, None)

    async def copy(self) -> None:
        """Get what this node is to hold, until cancelled."""
        copiers = [asyncio.ensure_future(self._copy_some()) for _ in range(_NUM_COPIERS)]
        try:
            while True:
                done, _ = await asyncio.wait(
                    copiers, timeout=_RETRY_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for each in done:
                    each.result()
                self.retry()
        finally:
            for each in copiers:
                each.cancel()

    async def _copy_some(self) -> None:
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
                await self._engine.obtain(Want(key, portion, math.inf, Mode.COPY))
            except AwayError:
                # Whoever has them may come back; others are not held up until then
                if self.find(key, portion):
                    self._later[key] = unite(self._later.get(key, NO_PAGES), portion)
            except ResourceError:
                pass  # it is held where it came from
            except MegablendError as error:
                LOG.warning("mirror: no copy is kept: %s", error)
            finally:
                self._num_copying -= 1

    def retry(self) -> None:
        """A node is back: what perhaps waits for it is copied."""
        for key, pages in self._later.items():
            self._to_copy[key] = unite(self._to_copy.get(key, NO_PAGES), pages)
            self._has_work.set()
        self._later = {}

    def divide_by_home(self, needs: Sequence[Need]) -> Mapping[str, list[Need]]:
        """Needs divided by the home of their pieces; without those whose home is this node."""
        found: dict[str, list[Need]] = {}
        for key, pages, due in needs:
            first = self._find_places(key, pages, 1)[:, 0]
            for place in np.unique(first).tolist():
                is_its = first == place
                some = Need(key, Pages(pages.blocks[is_its], pages.masks[is_its]), due[is_its])
                found.setdefault(self._names[place], []).append(some)
        found.pop(self._own, None)
        return found
