"""The places from which this node gets pages: nodes that announced them, their home, and the
source.

Each piece has an order of all nodes. A node requests pages from the nodes before it in the order,
beginning with the home, which gets the pages and keeps them. Only the first node that responds
reads the source. Since a node asks only nodes before it, nodes never wait in a circle. That holds
within one view. So requests to other nodes end with the view, and this node waits for nodes that
are in another view. Reads of the source continue, and the next node that reads the same pages waits
until they have finished. A node that may have been left out of a view that it does not know reads
only pages that are due soon from the source, since other nodes may be the homes of its pieces now.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
"""The number of nodes after those that keep a piece which are asked for its pages if all nodes
before them are away."""


class EndedError(Exception):
    """A later view is in force, and its routes must be used."""


@dataclass(eq=False)
class Reading:
    """A call of `PageReader.read`, which takes pages from one place after another."""

    want: Want
    """The pages that are still to be read."""
    keep_pages: Keep

    async def keep(self, pages: Pages, data: memoryview, origins: Origins) -> None:
        """Store pages, and remove them from those that are still to be read."""
        self.want = self.want._replace(pages=subtract(self.want.pages, pages))
        await self.keep_pages(pages, data, origins)


@dataclass(eq=False)
class Routes:
    """Reads pages from other nodes, or from the source, within one view."""

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
    """Done when a later view is in force."""

    async def read(self, reading: Reading) -> None:
        """Read all pages that are still to be read. Raises: the same errors as `PageReader.read`;
        EndedError before the source is read, if a later view is in force; AwayError also if there
        may be a later view that this node does not know."""
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
        """Read those of the remaining pages that another node holds, if that node is reachable."""
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
        """Make the first of some nodes that can do so get the remaining pages. If pages remain on
        return, this node should read them. Raises: AwayError or ResourceError if the pages should
        wait for one of the nodes."""
        for name in names:
            want = reading.want
            if not want.pages:
                return
            try:
                pages, data = await self._fetch(name, want, Ask.ALL)
            except AwayError:
                # It may come back with the pages, which then need not leave the source again
                if not is_soon(want.due) and not self.peers[name].is_gone:
                    raise
                continue
            except ResourceError:
                # It has no room for them: this node reads them itself, but not before they are due soon
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
        """Store pages from the node `giver`, or from the source, and have them announced."""
        if pages:
            await reading.keep(pages, data, origins)
            self.announcements.note_own(reading.want.key, pages, giver)

    async def _fetch(self, name: str, want: Want, ask: Ask) -> tuple[Pages, memoryview]:
        """Fetch pages as `Peer.fetch` does, but wait for a node that is in another view. Raises:
        EndedError, too."""
        deadline = time.monotonic() + self.pace.silent
        while True:
            task = asyncio.ensure_future(self.peers[name].fetch(want, self.view, ask))
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

    def _may_read(self) -> bool:
        """Return whether this node is certainly in the view in force: it has a lease; or it reaches
        most of the nodes, which then cannot reach etcd either, and make no view without it."""
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
        """Return the nodes before this one in a piece's order, which are asked for its pages."""
        count = self.placement.copies + _NUM_RESERVES
        order = self.placement.order(want.key, piece_of(want.pages), count)
        own = self.placement.own
        return order[: order.index(own)] if own in order else order

    def _list_earlier_readers(self, want: Want) -> Iterator[str]:
        """Yield the nodes that may still be reading pages from the source because of an earlier
        view: for each earlier view, the first connected node in the order of the piece."""
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
