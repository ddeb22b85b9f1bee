"""From where this node gets pages: from nodes that announced them, from their home, from the
source.

Each piece has an order of all nodes. A node requests pages from the nodes before it in the order,
beginning with the home, which gets the pages and keeps them. Only the first of them that answers
reads the source. Since a node asks only nodes before it, nodes never wait in a circle. That holds
within one view. So a node that is in another view is waited for, and requests to other nodes end
with the view. Reads of the source continue, and whoever reads the same pages next waits until they
have finished. A node that may have been left out by a view that it has not heard of reads only
pages that are due soon from the source, since other nodes may be the homes of its pieces now.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megablend.errors import MegablendError, ResourceError
from megablend.mirror.disk.pages import PIECE_BLOCKS, Pages, intersect, subtract
from megablend.mirror.disk.room import Need
from megablend.mirror.members.homes import Homes
from megablend.mirror.members.launchers import Pace
from megablend.mirror.node.engine import AwayError, Keep, Mode, Origins, PageReader, Want, is_soon
from megablend.mirror.node.frames import pack_needs
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.peer import OtherViewError, Peer
from megablend.system.log import LOG

_NUM_RESERVES = 8
"""The number of nodes after those that keep a piece that are asked for its pages, if all nodes before
them are away."""


class EndedError(Exception):
    """A later view is in force: its routes have to be used."""


@dataclass(eq=False)
class Routes:
    """Reads pages from other nodes, or from the source, within one view."""

    source: PageReader
    holders: Holders
    peers: Mapping[str, Peer]
    own: str
    """This node's name."""
    view: int
    """The number of the view."""
    may_read: Callable[[], bool]
    """Returns whether this node is surely in the view in force, and so may read the source."""
    earlier: Sequence[Homes]
    """The homes of earlier views, whose nodes may still be reading from the source."""
    pace: Pace
    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when a later view is in force."""

    async def read(self, want: Want, keep: Keep) -> None:
        """See `PageReader.read`. Raises: EndedError before the source is read, if a later view is
        in force; AwayError also if there may be a later view that this node has not heard of."""
        key = want.key

        async def take(name: str, pages: Pages, data: memoryview) -> None:
            nonlocal want
            if pages:
                want = want._replace(pages=subtract(want.pages, pages))
                await keep(pages, data, Origins(peers=len(data)))
                self.holders.note_own(key, pages, name)

        async def take_held(name: str, *, settles: bool = False) -> None:
            try:
                pages, data = await self._fetch(name, want, only_held=True, settles=settles)
            except AwayError:
                return
            except MegablendError as error:
                LOG.info("mirror: node %s did not provide %s: %s", name, key.location, error)
                return
            self.holders.forget(name, key, subtract(want.pages, pages))
            await take(name, pages, data)

        if want.mode is not Mode.FRESH:
            for name, _ in self.holders.find_announced(key, want.pages):
                await take_held(name)
                if not want.pages:
                    return
        if want.mode is Mode.COPY:
            raise AwayError("no node that announced these pages still has them")
        for name in self._list_before(want):
            try:
                pages, data = await self._fetch(name, want, only_held=False)
            except AwayError:
                if not is_soon(want.due) and not self.peers[name].is_gone:
                    raise
                continue
            except ResourceError:
                if not is_soon(want.due):
                    raise
                break
            except MegablendError as error:
                # This node may be able to read what the other one cannot
                LOG.info("mirror: node %s cannot get %s: %s", name, key.location, error)
                break
            await take(name, pages, data)
            if not want.pages:
                return

        for name in self._list_readers(want):
            await take_held(name, settles=True)
            if not want.pages:
                return
        if self.ended.done():
            raise EndedError
        if not is_soon(want.due) and not self.may_read():
            raise AwayError(
                "the other nodes may have dropped this node, because it can reach neither etcd nor most of them"
            )

        async def keep_and_note(pages: Pages, data: memoryview, origins: Origins) -> None:
            await keep(pages, data, origins)
            self.holders.note_own(key, pages, None)

        await self.source.read(want, keep_and_note)

    async def _fetch(self, name: str, want: Want, **how: bool) -> tuple[Pages, memoryview]:
        """Fetch pages as `Peer.fetch` does, but wait for a node that is in another view. Also
        raises EndedError."""
        deadline = time.monotonic() + self.pace.silent
        while True:
            task = asyncio.ensure_future(self.peers[name].fetch(want, self.view, **how))
            try:
                awaited: list[asyncio.Future[Any]] = [task, self.ended]
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise EndedError
                return task.result()
            except OtherViewError as error:
                if time.monotonic() > deadline:
                    raise AwayError(str(error)) from None
            finally:
                task.cancel()
            await asyncio.wait([self.ended], timeout=self.pace.ping / 4)

    def _list_before(self, want: Want) -> list[str]:
        """List the nodes before this one in the order of a piece: they are asked for its pages."""
        piece = int(want.pages.blocks[0]) // PIECE_BLOCKS
        order = self.holders.order(want.key, piece, self.holders.copies + _NUM_RESERVES)
        return order[: order.index(self.own)] if self.own in order else order

    def _list_readers(self, want: Want) -> Iterator[str]:
        """Yield the nodes that may still be reading pages from the source because of an earlier
        view: for each earlier view, the first node in the order of the piece that is connected
        now."""
        if want.mode is Mode.FRESH:
            return
        piece = int(want.pages.blocks[0]) // PIECE_BLOCKS
        done = {self.own}
        for homes in self.earlier:
            for name in homes.order_names(want.key.digest, piece, _NUM_RESERVES):
                peer = self.peers.get(name)
                if name not in done and peer is not None and peer.away_since is None:
                    done.add(name)
                    yield name
                if name in done:
                    break


class TrackedSource(PageReader):
    """Reads the source, and knows what is being read from it."""

    def __init__(self, source: PageReader) -> None:
        self._source = source
        self._reading: dict[asyncio.Future[None], Want] = {}

    async def read(self, want: Want, keep: Keep) -> None:
        """See PageReader.read."""
        done = asyncio.get_running_loop().create_future()
        self._reading[done] = want
        try:
            await self._source.read(want, keep)
        finally:
            del self._reading[done]
            done.set_result(None)

    async def settle(self, want: Want) -> None:
        """Wait until the reads of any of the pages that are under way have finished."""
        concerned = [
            done
            for done, other in self._reading.items()
            if other.key == want.key and intersect(other.pages, want.pages)
        ]
        if concerned:
            await asyncio.wait(concerned)


async def announce_due(
    peers: Mapping[str, Peer], batches: Mapping[str, Sequence[list[Need]]]
) -> None:
    """Announce to nodes the pages that this one will request, in batches; nodes that are away are
    skipped."""

    async def announce(peer: Peer) -> None:
        path = "/v1/due"
        for batch in batches[peer.name]:
            await peer.post(path, pack_needs(batch))
            path = "/v1/due?more=1"

    results = await asyncio.gather(
        *(announce(peers[name]) for name in batches), return_exceptions=True
    )
    for error in results:
        if isinstance(error, BaseException) and not isinstance(error, AwayError):
            LOG.warning("mirror: cannot announce due pages to other nodes: %s", error)
