"""The nodes of one view. Before they read from one another they meet: each node announces the pages
that it holds to all others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megablend.errors import ConfigError, MegablendError
from megablend.mirror.disk.room import Need
from megablend.mirror.members.homes import list_id
from megablend.mirror.members.views import View
from megablend.mirror.node.engine import AwayError
from megablend.mirror.node.frames import batch_needs, pack_needs
from megablend.mirror.peers.announcements import Announcements
from megablend.mirror.peers.copies import Copies
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.meeting import ONE_NAME, Agreement, Joining
from megablend.mirror.peers.peer import Peer
from megablend.mirror.peers.placement import Placement
from megablend.mirror.peers.routes import Routes
from megablend.system.log import LOG

_FIRST_MACHINE_PINGS = 5
"""If there are no new pages, the first machine of a torchrun job is sent a ping after this many
times `Pace.ping`."""

_NEWS_SECONDS = 0.2
"""The pause after new pages have been announced to a node. Pages that arrive meanwhile are
announced together, since a request for each would take as long as reading it."""


@dataclass(eq=False)
class Assembly:
    """The nodes of one view, as one of them sees them. They meet, and then read from one another
    until the nodes of the next view have met."""

    view: View
    session: str
    """The session of this node: a random id that it chose when it started."""
    peers: Mapping[str, Peer]
    """The other nodes, by name."""
    placement: Placement
    announcements: Announcements
    holders: Holders
    copies: Copies
    routes: Routes
    agreement: Agreement
    joining: Joining
    is_formed: bool = False
    """Whether the nodes have met: all of them, or enough to continue."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """The tasks that are cancelled when the view ends."""
    _told_sessions: dict[str, str] = field(default_factory=dict)
    """The nodes to which this node has announced all its pages, each with the session in which the
    node received them."""
    _heard_nodes: set[str] = field(default_factory=set)
    """The nodes that have announced their pages to this one."""
    _is_formed_elsewhere: bool = False
    """Whether another node has reported that the nodes have met."""

    @property
    def has_ended(self) -> bool:
        """Whether a later view has replaced this one."""
        return self.routes.ended.done()

    def end(self) -> None:
        """Cancel requests and tasks, because a later view replaces this one."""
        if not self.has_ended:
            self.routes.ended.set_result(None)
        for task in self.tasks:
            task.cancel()

    async def announce_to(self, peer: Peer) -> None:
        """Announce this node's pages to another node until the view ends. All pages are announced
        at first and after each restart of the other node, and later only new ones."""
        pace = self.agreement.pace
        while not self.has_ended:
            pause = 0.0
            try:
                if peer.away_since is not None:
                    raise peer.refusal or AwayError(peer.trouble)
                if self._told_sessions.get(peer.name) != peer.session:
                    await self._announce_all(peer)
                elif self.announcements.news[peer.name].is_set():
                    await self._announce_news(peer)
                    pause = _NEWS_SECONDS
                else:
                    await self._wait_for_news(peer)
            except AwayError:
                pause = pace.ping / 2
            except MegablendError as error:
                self.agreement.fail(error)
                pause = pace.silent + pace.ping / 2
            await asyncio.sleep(pause)

    async def _announce_all(self, peer: Peer) -> None:
        await self.joining.join(peer)
        about = f"{list_id(self.view.names)}&session={self.session}"
        # Before the pages, which may be many: the node may refuse this one
        await self._tell(peer, f"&greets={about}", [])
        session = peer.session
        needs = await self.announcements.find_all(peer.name)
        await self._announce(peer, needs, f"&list={about}&formed={int(self.is_formed)}")
        # A node that was restarted in the meantime is notified of everything again
        if session == peer.session:
            self._told_sessions[peer.name] = session

    async def _announce_news(self, peer: Peer) -> None:
        needs = self.announcements.take(peer.name)
        try:
            await self._announce(peer, needs, "")
        except (AwayError, MegablendError):
            self.announcements.put_back(peer.name, needs)
            raise

    async def _announce(self, peer: Peer, needs: Sequence[Need], greeting: str) -> None:
        *batches, last = batch_needs(needs)
        for batch in batches:
            await self._tell(peer, "", batch)
        # The greeting goes with the last batch: from then on the other node knows all pages
        await self._tell(peer, greeting, last)
        self.agreement.note_news()

    async def _tell(self, peer: Peer, query: str, needs: Sequence[Need]) -> None:
        await peer.post(f"/v1/tell?view={self.view.number}{query}", pack_needs(needs))

    async def announce_due(self, needs: Sequence[Need]) -> None:
        """Tell each other node which pages this node will request from it as their home, and when.
        Unreachable nodes are skipped."""
        needs_by_home = await asyncio.to_thread(self.placement.divide, needs, self.peers, 1)

        async def announce(peer: Peer) -> None:
            path = "/v1/due"
            for batch in batch_needs(needs_by_home[peer.name]):
                await peer.post(path, pack_needs(batch))
                path = "/v1/due?more=1"

        results = await asyncio.gather(*map(announce, self.peers.values()), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, AwayError):
                LOG.warning("mirror: cannot announce due pages to other nodes: %s", error)

    async def _wait_for_news(self, peer: Peer) -> None:
        """Wait until there are pages to announce to a node. Meanwhile, send pings to the first
        machine of a torchrun job: other nodes must notice if it is restarted, since it then does
        not know them."""
        news = self.announcements.news[peer.name]
        if not self.joining.is_first(peer):
            await news.wait()
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(news.wait(), _FIRST_MACHINE_PINGS * self.agreement.pace.ping)
        if not news.is_set():
            await peer.ping()

    async def note_pages(self, node: str, query: Mapping[str, str], needs: Sequence[Need]) -> None:
        """Record pages that `node` has announced. Raises: ConfigError if it is not in the view."""
        listed = query.get("list", query.get("greets"))
        if listed is not None:
            await self._check_greeting(node, listed, query.get("session"))
        if node not in self.peers:
            raise ConfigError(explain_unknown(node, self.placement.own))
        self.holders.note(node, needs)
        await self.copies.note_announced(needs)
        if "list" in query:
            self._heard_nodes.add(node)
            self._is_formed_elsewhere |= query.get("formed") == "1"
            self.agreement.note_news()

    async def _check_greeting(self, node: str, listed: str, session: str | None) -> None:
        """Check the digest of another node's list of nodes, and the node's session. Raises:
        ConfigError if the list differs from that of this node, or two nodes have the same name."""
        if listed != list_id(self.view.names):
            raise ConfigError(
                f"the list of nodes of {node} differs from that of {self.placement.own}\n"
                "give all nodes the same `nodes`, and stop the node processes of earlier jobs (`megablend node "
                "stop`)"
            )
        peer = self.peers.get(node)
        if peer is None or session in ("", peer.session):
            return
        # Either the node was restarted, or another one has its name
        if await peer.ping() and peer.session != session:
            raise ConfigError(f"{node}: two nodes have this name\n{ONE_NAME}")

    def count_debts(self) -> dict[str, int]:
        """Return numbers for users and metrics: copies of each page, bytes that this node has yet
        to copy, copies in progress, and nodes to which pages have yet to be announced."""
        return {
            "copies": self.placement.copies,
            "bytes_to_copy": self.copies.count_bytes(),
            "copying": self.copies.num_copying,
            "untold_nodes": self.announcements.count_untold(),
        }

    async def form(self) -> None:
        """Wait until all nodes have met, or enough of them to continue. Raises: ConfigError if
        nodes are missing and `strict` is set."""
        deadline = time.monotonic() + self.agreement.pace.complete
        while not (self.is_formed or self.has_ended):
            missing = sorted(
                name
                for name, peer in self.peers.items()
                if name not in self._heard_nodes or self._told_sessions.get(name) != peer.session
            )
            are_missing_away = all(self.peers[name].away_since is not None for name in missing)
            have_met = not missing or (self._is_formed_elsewhere and are_missing_away)
            is_late = time.monotonic() > deadline and self.agreement.failure is None
            explained = [f"{name} ({self._explain(name)})" for name in missing]
            if have_met or (is_late and self.agreement.is_enough(explained)):
                self.is_formed = True
            else:
                await self.agreement.wait_for_news()

    def _explain(self, name: str) -> str:
        """Return the reason why a node is treated as missing."""
        if name in self._heard_nodes:
            return (
                f"it can reach this node, but this node cannot reach it: {self.peers[name].trouble}"
            )
        return (
            self.peers[name].trouble if name not in self._told_sessions else "it has sent nothing"
        )


def explain_unknown(node: str, own: str) -> str:
    """Return the error message for a request from `node`, which is not in the list of nodes of this
    node, `own`."""
    return f"{node} is not in the list of nodes of {own}\ngive all nodes the same `nodes`"
