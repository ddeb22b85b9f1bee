"""From where pages come to this node: those who told that they hold them, their home, the source.

Each piece has an order of all nodes. A node asks those before it in the order, the home first: it
gets the pages and keeps them. The first of them that answers is the only one that asks the source.
Since a node asks only nodes before it, nobody waits in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megablend.errors import MegablendError, ResourceError
from megablend.mirror.disk.pages import PIECE_BLOCKS, Pages, subtract
from megablend.mirror.disk.room import Need
from megablend.mirror.node.engine import AwayError, Keep, Mode, Origins, PageReader, Want, is_soon
from megablend.mirror.node.frames import pack_needs
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.peer import Peer
from megablend.system.log import LOG

_MORE = 8
"""Nodes after those that keep a piece which are asked for it, if all before them are away."""


@dataclass(eq=False)
class Routes:
    """Reads pages from other nodes, or from the source."""

    source: PageReader
    holders: Holders
    peers: Mapping[str, Peer]
    own: str
    """This node's name."""

    async def read(self, want: Want, keep: Keep) -> None:
        """See PageReader.read."""
        key = want.key
        missing = want.pages

        async def fetch(name: str, *, only_held: bool) -> tuple[Pages, memoryview]:
            asked = want._replace(pages=missing)
            return await self.peers[name].fetch(asked, only_held=only_held)

        async def take(name: str, pages: Pages, data: memoryview) -> None:
            nonlocal missing
            if len(pages.blocks):
                missing = subtract(missing, pages)
                await keep(pages, data, Origins(peers=len(data)))
                self.holders.note(key, pages, name)

        if want.mode is not Mode.FRESH:
            for name, _ in self.holders.find(key, missing):
                try:
                    pages, data = await fetch(name, only_held=True)
                except AwayError:
                    continue
                except MegablendError as error:
                    LOG.info("mirror: node %s does not give %s: %s", name, key.location, error)
                    continue
                self.holders.forget(name, key, subtract(missing, pages))
                await take(name, pages, data)
                if not len(missing.blocks):
                    return
        if want.mode is Mode.COPY:
            raise AwayError("nobody who told of these pages has them now")
        for name in self._list_before(want):
            try:
                pages, data = await fetch(name, only_held=False)
            except AwayError:
                if not is_soon(want.due) and not self.peers[name].is_gone:
                    raise
                continue
            except ResourceError:
                if not is_soon(want.due):
                    raise
                break
            except MegablendError as error:
                # Perhaps this node may do what its home cannot
                LOG.info("mirror: node %s cannot get %s: %s", name, key.location, error)
                break
            await take(name, pages, data)
            if not len(missing.blocks):
                return

        async def keep_and_note(pages: Pages, data: memoryview, origins: Origins) -> None:
            await keep(pages, data, origins)
            self.holders.note(key, pages, None)

        await self.source.read(want._replace(pages=missing), keep_and_note)

    def _list_before(self, want: Want) -> list[str]:
        """The nodes that are asked for pages, this one's place is after them."""
        piece = int(want.pages.blocks[0]) // PIECE_BLOCKS
        order = self.holders.order(want.key, piece, self.holders.copies + _MORE)
        return order[: order.index(self.own)] if self.own in order else order


async def tell_due(peers: Mapping[str, Peer], batches: Mapping[str, Sequence[list[Need]]]) -> None:
    """Tell nodes what this one will ask for, in batches; who is away is left out."""

    async def tell(peer: Peer) -> None:
        path = "/v1/due"
        for batch in batches[peer.name]:
            await peer.post(path, pack_needs(batch))
            path = "/v1/due?more=1"

    found = await asyncio.gather(*(tell(peers[name]) for name in batches), return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, AwayError):
            LOG.warning("mirror: what is due is not told: %s", each)
