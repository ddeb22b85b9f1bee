"""How the nodes of one view meet: they tell one another what they hold."""

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
"""After so many times `Pace.ping` without news, a torchrun job's first machine is pinged."""


@dataclass(eq=False)
class Assembly:
    """The nodes of one view. They meet, and then read through one another, until those of the next
    view have met."""

    view: View
    own: str
    """This node's name."""
    session: str
    """The session of this node."""
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
    _told: dict[str, str] = field(default_factory=dict)
    """The nodes that were told what this one holds, and the session in which each was."""
    _heard: set[str] = field(default_factory=set)
    """The nodes that have told this one what they hold."""
    _is_one_formed: bool = False
    """Whether one of them said that its nodes have met."""

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

    async def tell(self, peer: Peer) -> None:
        """Tell another node what this one holds: everything at first, then what is new."""
        news = self.holders.news[peer.name]
        while not self.has_ended:
            needs: list[Need] = []
            session = peer.session
            is_first = self._told.get(peer.name) != session
            query = f"?view={self.view.number}"
            greeting = ""
            try:
                if peer.away_since is not None:
                    # Before `find_all`, which takes long if much is held
                    raise peer.refusal or AwayError(peer.trouble)
                if is_first:
                    await self.joining.join(peer)
                    needs = await self.holders.find_all(peer.name)
                    greeting = f"&list={list_id(self.view.names)}&session={self.session}&formed={int(self.is_formed)}"
                elif news.is_set():
                    needs = self.holders.take_untold(peer.name)
                elif self.joining.is_first(peer):
                    # After a restart it does not know the others, so they have to notice it
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(
                            news.wait(), _FIRST_MACHINE_PINGS * self.agreement.pace.ping
                        )
                    if not news.is_set():
                        await peer.ping()
                    continue
                else:
                    await news.wait()
                    continue
                *parts, last = batch_needs(needs)
                for part in parts:
                    await peer.post(f"/v1/tell{query}", pack_needs(part))
                await peer.post(f"/v1/tell{query}{greeting}", pack_needs(last))
                if session in ("", peer.session):
                    self._told[peer.name] = peer.session
                self.agreement.note_news()
            except (AwayError, MegablendError) as error:
                if not is_first:
                    self.holders.put_back(peer.name, needs)
                if isinstance(error, MegablendError):
                    self.agreement.fail(error)
                    await asyncio.sleep(self.agreement.pace.silent)
                await asyncio.sleep(self.agreement.pace.ping / 2)

    async def hear(self, node: str, query: Mapping[str, str], needs: Sequence[Need]) -> None:
        """Record what another node holds. Raises: ConfigError if it is not one of the nodes."""
        if "list" in query:
            await self._greet(node, query)
        if node not in self.peers:
            raise ConfigError(is_unknown(node, self.own))
        await self.holders.hear(node, needs)
        if "list" in query:
            self._heard.add(node)
            self._is_one_formed |= query.get("formed") == "1"
            self.agreement.note_news()

    async def _greet(self, node: str, query: Mapping[str, str]) -> None:
        """Check the first message of another node. Raises: ConfigError if its list of nodes
        differs, or a third node has its name."""
        if query["list"] != list_id(self.view.names):
            raise ConfigError(
                f"the list of nodes of {node} differs from that of {self.own}\n"
                "Give all nodes the same `nodes`, and stop the node processes of earlier jobs (`megablend node "
                "stop`)."
            )
        peer = self.peers.get(node)
        session = query.get("session")
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
                if name not in self._heard or self._told.get(name) != peer.session
            )
            are_missing_away = all(self.peers[name].away_since is not None for name in missing)
            have_met = not missing or (self._is_one_formed and are_missing_away)
            is_late = time.monotonic() > deadline and self.agreement.failure is None
            explained = [f"{name} ({self._explain(name)})" for name in missing]
            if have_met or (is_late and self.agreement.is_enough(explained)):
                self.is_formed = True
            else:
                await self.agreement.wait_for_news()

    def _explain(self, name: str) -> str:
        if name in self._heard:
            return (
                f"it can reach this node, but this node cannot reach it: {self.peers[name].trouble}"
            )
        return self.peers[name].trouble if name not in self._told else "it has sent nothing"


def is_unknown(node: str, own: str) -> str:
    """The message for a request of `node`, which is not in the list of nodes of `own`."""
    return f"{node} is not one of the nodes of {own}\nlist it there"
