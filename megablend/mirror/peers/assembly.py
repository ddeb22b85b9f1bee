"""The meeting of the nodes of one view: they announce the pages that they hold to one another."""

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
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.meeting import ONE_NAME, Agreement, Joining
from megablend.mirror.peers.peer import Peer
from megablend.mirror.peers.routes import Routes

_FIRST_MACHINE_PINGS = 5
"""A torchrun job's first machine is pinged after 5 times `Pace.ping` without news."""


@dataclass(eq=False)
class Assembly:
    """The nodes of one view. They meet, and then read through one another, until those of the next
    view have met."""

    view: View
    own: str
    """This node's name."""
    session: str
    """This node's session."""
    peers: Mapping[str, Peer]
    """The other nodes, by name."""
    holders: Holders
    routes: Routes
    agreement: Agreement
    joining: Joining
    is_formed: bool = False
    """Whether the nodes have met: all of them, or enough."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks that end with the view."""
    _told_sessions: dict[str, str] = field(default_factory=dict)
    """For each node that knows this node's pages: the session of the node that was notified."""
    _heard_nodes: set[str] = field(default_factory=set)
    """The nodes that have announced their pages to this one."""
    _is_formed_elsewhere: bool = False
    """Whether one of these nodes has reported that the nodes have met."""

    @property
    def has_ended(self) -> bool:
        """Whether a later view has replaced this one."""
        return self.routes.ended.done()

    def end(self) -> None:
        """End requests and tasks, since a later view replaces this one."""
        if not self.has_ended:
            self.routes.ended.set_result(None)
        for task in self.tasks:
            task.cancel()

    async def announce_to(self, peer: Peer) -> None:
        """Announce this node's pages to another node until the view ends: all pages at first, and
        after each restart of the other node; then new ones."""
        path = f"/v1/tell?view={self.view.number}"
        while not self.has_ended:
            needs: list[Need] = []
            session = peer.session
            is_first = self._told_sessions.get(peer.name) != session
            greeting = ""
            try:
                if peer.away_since is not None:
                    # Before `find_all`, which takes a long time if many pages are held
                    raise peer.refusal or AwayError(peer.trouble)
                if is_first:
                    await self.joining.join(peer)
                    about = f"{list_id(self.view.names)}&session={self.session}"
                    # Before the pages, which may be many: the node may refuse this one
                    await peer.post(f"{path}&greets={about}", pack_needs([]))
                    session = peer.session
                    needs = await self.holders.find_all(peer.name)
                    greeting = f"&list={about}&formed={int(self.is_formed)}"
                elif self.holders.news[peer.name].is_set():
                    needs = self.holders.take_unannounced(peer.name)
                else:
                    await self._wait_for_news(peer)
                    continue
                *batches, last = batch_needs(needs)
                for batch in batches:
                    await peer.post(path, pack_needs(batch))
                # The greeting goes with the last batch: from then on the other node knows all pages
                await peer.post(path + greeting, pack_needs(last))
                # A node that was restarted in the meantime is notified of everything again
                if session == peer.session:
                    self._told_sessions[peer.name] = session
                self.agreement.note_news()
            except (AwayError, MegablendError) as error:
                if not is_first:
                    self.holders.put_back(peer.name, needs)
                if isinstance(error, MegablendError):
                    self.agreement.fail(error)
                    await asyncio.sleep(self.agreement.pace.silent)
                await asyncio.sleep(self.agreement.pace.ping / 2)

    async def _wait_for_news(self, peer: Peer) -> None:
        """Wait until there are pages to announce to a node. The first machine of a torchrun job is
        pinged in the meantime: after a restart it does not know the other nodes, so they must notice
        the restart."""
        news = self.holders.news[peer.name]
        if not self.joining.is_first(peer):
            await news.wait()
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(news.wait(), _FIRST_MACHINE_PINGS * self.agreement.pace.ping)
        if not news.is_set():
            await peer.ping()

    async def note_pages(self, node: str, query: Mapping[str, str], needs: Sequence[Need]) -> None:
        """Record announced pages. Raises: ConfigError if `node` is not one of the nodes."""
        listed = query.get("list", query.get("greets"))
        if listed is not None:
            await self._check_greeting(node, listed, query.get("session"))
        if node not in self.peers:
            raise ConfigError(explain_unknown(node, self.own))
        await self.holders.note_announced(node, needs)
        if "list" in query:
            self._heard_nodes.add(node)
            self._is_formed_elsewhere |= query.get("formed") == "1"
            self.agreement.note_news()

    async def _check_greeting(self, node: str, listed: str, session: str | None) -> None:
        """Check the digest of another node's list of nodes, and its session. Raises: ConfigError if
        the list differs, or a third node has its name."""
        if listed != list_id(self.view.names):
            raise ConfigError(
                f"the list of nodes of {node} differs from that of {self.own}\n"
                "give all nodes the same `nodes`, and stop the node processes of earlier jobs (`megablend node "
                "stop`)"
            )
        peer = self.peers.get(node)
        if peer is None or session in ("", peer.session):
            return
        # Either the node was restarted, or another one has its name
        if await peer.ping() and peer.session != session:
            raise ConfigError(f"{node}: two nodes have this name\n{ONE_NAME}")

    async def form(self) -> None:
        """Wait until all nodes have met, or enough of them. Raises: ConfigError if some are missing
        with `strict`."""
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
        """Return why a node counts as missing."""
        if name in self._heard_nodes:
            return (
                f"it can reach this node, but this node cannot reach it: {self.peers[name].trouble}"
            )
        return (
            self.peers[name].trouble if name not in self._told_sessions else "it has sent nothing"
        )


def explain_unknown(node: str, own: str) -> str:
    """Return the message for a request of `node`, which the list of nodes of `own` lacks."""
    return f"{node} is not in the list of nodes of {own}\ngive all nodes the same `nodes`"
