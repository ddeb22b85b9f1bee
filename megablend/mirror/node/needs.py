"""Keeps the needs of a node's clients and of other nodes: which pages they will read, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import Pages, add_pages
from megablend.mirror.disk.room import PAST_SECONDS, Need
from megablend.mirror.node.due_order import find_lead, order_by_due
from megablend.mirror.node.engine import Engine
from megablend.mirror.node.fetch_ahead import FetchAhead

_PAUSE_SECONDS = 0.2
"""The minimum number of seconds between two updates of all due times, which take long if there are
many."""
_LEAD_SHARE = 32
"""Pages that were fetched ahead and displaced others make up at most 1/32 of the held bytes."""
_MIN_GRACE_SECONDS = 0.5
"""The minimum number of seconds between the due time of a page and the time at which it is treated
as read. It applies to small mirrors."""


class Needs:
    """The needs of clients and of other nodes. Fetches the clients' pages ahead, makes the store
    keep needed pages, and announces the clients' needs to other nodes.

    Args:
        engine: fetches and stores the pages.
        announce: a function that is called with the needs of all clients after changes; None
            without other nodes.
    """

    def __init__(
        self,
        engine: Engine,
        announce: Callable[[Sequence[Need]], Awaitable[None]] | None = None,
    ) -> None:
        self._engine = engine
        self._announce = announce
        self._is_announced = True
        """Whether `announce` has been called since the last change of the clients' needs."""
        self._of_clients: dict[str, Sequence[Need]] = {}
        self._of_nodes: dict[str, Sequence[Need]] = {}
        self._changed = asyncio.Event()
        self._ahead = FetchAhead(engine)

    def set(self, client: str, needs: Sequence[Need]) -> None:
        """Replace the needs of a client."""
        _replace(self._of_clients, client, needs)
        self.announce_again()

    def set_of_node(self, node: str, needs: Sequence[Need], *, is_more: bool = False) -> None:
        """Replace the needs of another node, or add needs if `is_more`. Pages that are held are
        kept by due time; the others are fetched only when the node requests them."""
        earlier = self._of_nodes.get(node, []) if is_more else []
        _replace(self._of_nodes, node, [*earlier, *needs])
        self._changed.set()

    @property
    def is_fetching(self) -> bool:
        """Whether any pages are being fetched ahead, or are still to be fetched."""
        return self._ahead.is_fetching

    def list_needed(self) -> dict[FileKey, Pages]:
        """Return all pages that clients or other nodes need."""
        needed: dict[FileKey, Pages] = {}
        for need in _join(self._of_clients) + _join(self._of_nodes):
            add_pages(needed, need.key, need.pages)
        return needed

    def announce_again(self) -> None:
        """Announce the needs to other nodes again, since some nodes may not know them."""
        self._is_announced = False
        self._changed.set()

    async def run(self) -> None:
        """Update due times, fetches and announcements after each change, until cancelled."""
        announcing: asyncio.Future[None] | None = None
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                own = _join(self._of_clients)
                await self._apply(own)
                # Not after changes by other nodes: all nodes would announce to one another forever
                if self._announce is not None and not self._is_announced:
                    self._is_announced = True
                    # Not awaited: a silent node must not delay this loop. A later call replaces it
                    if announcing is not None:
                        announcing.cancel()
                    announcing = asyncio.ensure_future(self._announce(own))
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            self._ahead.stop()
            if announcing is not None:
                announcing.cancel()

    async def _apply(self, own: list[Need]) -> None:
        """Update the due times in the store, and the pages to fetch ahead.

        Args:
            own: the needs of the clients. Only their pages are fetched ahead.
        """
        usage = await self._engine.call(self._engine.store.usage)
        lead = await asyncio.to_thread(find_lead, own, usage.num_bytes // _LEAD_SHARE)
        grace = min(PAST_SECONDS, max(_MIN_GRACE_SECONDS, lead))
        self._engine.lead = lead
        every = own + _join(self._of_nodes)
        await self._engine.call(self._engine.store.set_due, every, grace)
        parts = await asyncio.to_thread(order_by_due, own)
        self._ahead.replace(parts, grace)


def _join(needs: Mapping[str, Sequence[Need]]) -> list[Need]:
    return [need for own_needs in needs.values() for need in own_needs]


def _replace(needs: dict[str, Sequence[Need]], name: str, new: Sequence[Need]) -> None:
    if new:
        needs[name] = new
    else:
        needs.pop(name, None)
