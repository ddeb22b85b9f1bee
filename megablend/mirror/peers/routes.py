"""Decides where this node gets pages: from nodes that announced them, from their home, or from the
source.

Each piece has an order of all nodes. A node requests pages from the nodes before it in the order,
beginning with the home, which fetches the pages and keeps them. So only the first node that
responds reads the source, and nodes never wait for one another in a circle.

This is true only within one view. So requests to other nodes are cancelled when the view ends, and
this node waits for nodes that are in another view. Reads of the source are not cancelled; the next
node that reads the same pages waits until they have finished. There may be a later view without
this node that it does not know of. In this case other nodes may be the homes of its pieces, so it
reads only pages that are due soon from the source.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from megablend.errors import MegablendError, ResourceError
from megablend.mirror.disk.pages import Pages, piece_of, subtract
from megablend.mirror.members.etcd_members import EtcdMembers
from megablend.mirror.members.homes import Homes
from megablend.mirror.members.launchers import Pace
from megablend.mirror.node.engine import AwayError, Keep, Mode, Origins, PageReader, Want, is_soon
from megablend.mirror.peers.announcements import Announcements
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.peer import Ask, OtherViewError, Peer
from megablend.mirror.peers.placement import Placement
from megablend.system.log import LOG

_NUM_RESERVES = 8
"""The number of additional nodes in a piece's order that are asked for pages if all nodes that keep
the piece are unreachable."""


class EndedError(Exception):
    """Raised if a later view is in force, so that its routes must be used."""


@dataclass(eq=False)
class Reading:
    """A call of `PageReader.read` in progress, which tries one place after another."""

    want: Want
    """The pages that have yet to be read."""
    keep_pages: Keep

    async def keep(self, pages: Pages, data: memoryview, origins: Origins) -> None:
        """Store pages that were read, and remove them from `want`."""
        self.want = self.want._replace(pages=subtract(self.want.pages, pages))
        await self.keep_pages(pages, data, origins)


@dataclass(eq=False)
class Routes:
    """A reader of pages within one view, from other nodes or from the source."""

    source: PageReader
    placement: Placement
    holders: Holders
    announcements: Announcements
    peers: Mapping[str, Peer]
    """The other nodes, by name."""
    view: int
    """The number of the view."""
    views: EtcdMembers | None
    """The views of a cluster whose nodes come and go; None otherwise."""
    earlier: Sequence[Homes]
    """The homes of earlier views, whose nodes may still be reading from the source."""
    pace: Pace
    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """A future that is done when a later view is in force."""

    async def read(self, reading: Reading) -> None:
        """Read all remaining pages of a call. Raises: the same errors as `PageReader.read`;
        EndedError if a later view comes into force before the source is read; AwayError also if
        there may be a later view that this node does not know of."""
        want = reading.want
        if want.mode is not Mode.FRESH:
            for name in self.holders.find(want.key, want.pages):
                await self._read_held(reading, name, Ask.HELD)
        if want.mode is not Mode.COPY:
            await self._read_through(reading, self._list_before(want))
            for name in self._list_earlier_readers(want):
                await self._read_held(reading, name, Ask.SETTLED)
            if reading.want.pages:
                await self._read_source(reading)
        elif reading.want.pages:
            raise AwayError("no node that announced these pages still has them")

    async def _read_held(self, reading: Reading, name: str, ask: Ask) -> None:
        """Read the remaining pages that another node holds, if that node is reachable."""
        want = reading.want
        if not want.pages:
            return
        try:
            pages, data = await self._fetch(name, want, ask)
        except AwayError:
            return
        except MegablendError as error:
            LOG.info("mirror: node %s did not provide %s: %s", name, want.key.location, error)
            return
        self.holders.forget(name, want.key, subtract(want.pages, pages))
        await self._keep(reading, name, pages, data, Origins(peers=len(data)))

    async def _read_through(self, reading: Reading, names: Sequence[str]) -> None:
        """Request the remaining pages from the first of the given nodes that responds, which
        fetches them if necessary. Pages that remain after this call should be read by this node.
        Raises: AwayError or ResourceError if this node should wait for one of the nodes."""
        for name in names:
            want = reading.want
            if not want.pages:
                return
            try:
                pages, data = await self._fetch(name, want, Ask.ALL)
            except AwayError:
                # The node may come back with the pages, which then need not be read from the source
                if not is_soon(want.due) and not self.peers[name].is_gone:
                    raise
                continue
            except ResourceError:
                # The node has no room for the pages: this node reads them, but only if they are due soon
                if not is_soon(want.due):
                    raise
                return
            except MegablendError as error:
                # This node may be able to read what the other one cannot
                LOG.info("mirror: node %s cannot read %s: %s", name, want.key.location, error)
                return
            await self._keep(reading, name, pages, data, Origins(peers=len(data)))

    async def _read_source(self, reading: Reading) -> None:
        """Read the remaining pages from the source."""
        if self.ended.done():
            raise EndedError
        if not is_soon(reading.want.due) and not self._may_read():
            raise AwayError(
                "the other nodes may have removed this node, since it can reach neither etcd nor most of them"
            )
        await self.source.read(reading.want, partial(self._keep, reading, None))

    async def _keep(
        self, reading: Reading, giver: str | None, pages: Pages, data: memoryview, origins: Origins
    ) -> None:
        """Store pages, and schedule their announcement. They came from the node `giver`, or from
        the source if it is None."""
        if pages:
            await reading.keep(pages, data, origins)
            self.announcements.note_own(reading.want.key, pages, giver)

    async def _fetch(self, name: str, want: Want, ask: Ask) -> tuple[Pages, memoryview]:
        """Fetch pages as `Peer.fetch` does, but wait if the node is in another view. Raises: the
        errors of `Peer.fetch`; EndedError."""
        deadline = time.monotonic() + self.pace.silent
        while not self.ended.done():
            try:
                return await self.peers[name].fetch(want, self.view, ask, self.ended)
            except OtherViewError as error:
                if time.monotonic() > deadline:
                    raise AwayError(str(error)) from None
            except AwayError:
                if not self.ended.done():
                    raise
            await asyncio.wait([self.ended], timeout=self.pace.ping / 4)
        raise EndedError

    def _may_read(self) -> bool:
        """Return whether this node is certainly in the view in force. It is if it has a lease. It
        also is if most nodes respond to it, since those nodes cannot reach etcd either, and so
        cannot make a view without this node."""
        doubt_since = None if self.views is None else self.views.find_doubt(self.view)
        if doubt_since is None:
            return True
        now = time.monotonic()
        since = max(doubt_since, now - self.pace.silent)
        num_there = 1
        for peer in self.peers.values():
            num_there += peer.responded_at > since
            # Earlier than needed, so that the next call finds a recent response
            if peer.responded_at < max(since, now - self.pace.silent / 2):
                peer.ping_if_silent()
        return since < math.inf and 2 * num_there > len(self.peers) + 1

    def _list_before(self, want: Want) -> list[str]:
        """Return the nodes before this one in a piece's order, from which it requests pages."""
        count = self.placement.copies + _NUM_RESERVES
        order = self.placement.order(want.key, piece_of(want.pages), count)
        own = self.placement.own
        return order[: order.index(own)] if own in order else order

    def _list_earlier_readers(self, want: Want) -> Iterator[str]:
        """Yield the nodes that may still be reading pages from the source because of earlier views.
        For each earlier view, this is the first connected node in the order of the piece."""
        if want.mode is Mode.FRESH:
            return
        asked = {self.placement.own}
        for homes in self.earlier:
            for name in homes.order_names(want.key.digest, piece_of(want.pages), _NUM_RESERVES):
                if name in asked:
                    break
                peer = self.peers.get(name)
                if peer is not None and peer.away_since is None:
                    asked.add(name)
                    yield name
                    break
