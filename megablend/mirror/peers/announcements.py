"""Keeps track of the pages that this node has yet to announce to other nodes.

A node announces its pages of a piece to the piece's homes, and to the next node in the piece's
order. It announces all held pages when the nodes connect, and later each new page. So a home knows
which other nodes hold pages that it lacks, for example after its disk was replaced, after the list
of nodes has changed, or after another node had to read the source. It copies the pages that it must
hold (`copies`) from these nodes, and reads from the source only pages that no node has announced.
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
    """The pages that this node has yet to announce to each of the other nodes of a view."""

    def __init__(self, engine: Engine, placement: Placement, names: Iterable[str]) -> None:
        self._engine = engine
        self._placement = placement
        self._pages: dict[str, dict[FileKey, Pages]] = {name: {} for name in names}
        """The pages to announce, by name of the node and file."""
        self.news = {name: asyncio.Event() for name in self._pages}
        """For each node, an event that is set while there are pages to announce to the node."""
        self._held_at_start: dict[str, list[Need]] | None = None
        """The pages that were held when the nodes connected, by name of the node. Nodes to which
        they have already been announced are left out. None before the store is searched."""
        self._searching = asyncio.Lock()
        self.successor: Announcements | None = None
        """The announcements to the nodes of the next view, to which new pages are also added; None
        without a next view."""

    def note_own(self, key: FileKey, pages: Pages, giver: str | None) -> None:
        """Record that this node has received new pages of one piece, which must be announced.

        Args:
            giver: the name of the node that sent the pages; None if they came from the source.
        """
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
        """Return all held pages that must be announced to another node. These belong to the pieces
        for which the other node is a home, or may become one. On the first call, the store is
        searched once for all nodes."""
        async with self._searching:
            if self._held_at_start is None:
                names = list(self._pages)
            elif name in self._held_at_start:
                # Including pages that this node received after the search, since the other node
                # reads pages that are not announced from the source
                return self._held_at_start.pop(name) + self.take(name)
            else:
                names = [name]
            for node in names:
                # Pages that were to be announced are held, so the search finds them
                self.take(node)
            held = await self._engine.call(self._find_held, names)
            self._held_at_start = self._held_at_start or held
            return held.pop(name)

    def _find_held(self, names: Sequence[str]) -> dict[str, list[Need]]:
        """Return the held pages to announce, by name of the node. Called in the store's thread."""
        store = self._engine.store
        keys = store.keys()
        held = (Need.of(key, store.held(key)) for key in keys)
        return self._placement.divide(held, names, self._placement.copies + 1)

    def take(self, name: str) -> list[Need]:
        """Return the pages that have yet to be announced to a node, and forget them. If the
        announcement fails, `put_back` must restore them."""
        pages_by_file = self._pages[name]
        self._pages[name] = {}
        self.news[name].clear()
        return [Need.of(key, pages) for key, pages in pages_by_file.items()]

    def put_back(self, name: str, needs: Sequence[Need]) -> None:
        """Restore pages that `take` returned but that could not be announced to the node."""
        for need in needs:
            add_pages(self._pages[name], need.key, need.pages)
        self.news[name].set()

    def count_untold(self) -> int:
        """Return the number of nodes to which pages are yet to be announced."""
        return sum(bool(pages) for pages in self._pages.values())
