"""The pages that this node has yet to announce to other nodes.

A node announces its pages of a piece to the piece's homes, and to the next node in the piece's
order: all held pages when the nodes meet, then each page that it gets. So a home knows which nodes
hold the pages that it lacks: after its own disk was replaced, after the list of nodes has changed,
or if another node had to read the source. It copies the pages that it must hold (`copies`), and
reads from the source only those that no node has announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import Pages, add_pages, piece_of
from megablend.mirror.disk.room import Need
from megablend.mirror.node.engine import Engine
from megablend.mirror.peers.placement import Placement


class Announcements:
    """The pages to announce to each other node of a view."""

    def __init__(self, engine: Engine, placement: Placement, names: Iterable[str]) -> None:
        self._engine = engine
        self._placement = placement
        self._pages: dict[str, dict[FileKey, Pages]] = {name: {} for name in names}
        """The pages to announce, by node and file."""
        self.news = {name: asyncio.Event() for name in self._pages}
        """For each node, an event that is set while there is something to announce to it."""
        self._held_at_start: dict[str, list[Need]] | None = None
        """For each node that has not received its first announcement: the pages for it, which were
        held when the nodes met. None before the store was searched."""
        self._searching = asyncio.Lock()
        self.successor: Announcements | None = None
        """The announcements to the nodes of the next view, which are also notified of new pages."""

    def note_own(self, key: FileKey, pages: Pages, giver: str | None) -> None:
        """Record that this node has received pages of one piece, from the node `giver` or from the
        source, which it must announce."""
        own = self._placement.own
        order = self._placement.order(key, piece_of(pages), self._placement.copies + 1)
        # The giver of a copy must know about the copy, to read it if its own pages are damaged
        keeps_copy = own in order[1 : self._placement.copies]
        for name in order:
            if name != own and (name != giver or keeps_copy):
                add_pages(self._pages[name], key, pages)
                self.news[name].set()
        if self.successor is not None:
            self.successor.note_own(key, pages, giver)

    async def find_all(self, name: str) -> list[Need]:
        """Return all held pages of the pieces of which another node is or may become a home. When
        the nodes meet, the store is searched once for all of them."""
        async with self._searching:
            if self._held_at_start is None:
                names = list(self._pages)
            elif name in self._held_at_start:
                # With what this node got after the search, since the other node reads what it does not
                # hear of from the source
                return self._held_at_start.pop(name) + self.take(name)
            else:
                names = [name]
            for each in names:
                # What was to be announced is held, and so found by the search
                self.take(each)
            held = await self._engine.call(self._find_held, names)
            self._held_at_start = self._held_at_start or held
            return held.pop(name)

    def _find_held(self, names: Sequence[str]) -> dict[str, list[Need]]:
        """Return the held pages to announce to each of some nodes. Called in the store's thread."""
        store = self._engine.store
        keys = store.keys()
        held = (Need.of(key, store.held(key)) for key in keys)
        return self._placement.divide(held, names, self._placement.copies + 1)

    def take(self, name: str) -> list[Need]:
        """Return the pages that have not been announced to a node, and remove them from the list;
        `put_back` restores them if the announcement fails."""
        pages_by_file = self._pages[name]
        self._pages[name] = {}
        self.news[name].clear()
        return [Need.of(key, pages) for key, pages in pages_by_file.items()]

    def put_back(self, name: str, needs: Sequence[Need]) -> None:
        """Restore pages that could not be announced to a node."""
        for need in needs:
            add_pages(self._pages[name], need.key, need.pages)
        self.news[name].set()

    def count_untold(self) -> int:
        """Return the number of nodes to which pages are yet to be announced."""
        return sum(bool(pages) for pages in self._pages.values())
