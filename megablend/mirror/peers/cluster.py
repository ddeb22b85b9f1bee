"""A cluster of nodes, as one of them sees it. The nodes meet, and then read from one another.

The nodes meet by announcing their pages to one another. Nothing is read before all nodes have met,
since a node that has not started yet would look dead and be skipped. After two minutes a majority
continues without missing nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import aiohttp

from megablend.errors import ConfigError, MegablendError, ResourceError
from megablend.mirror.disk.room import Need
from megablend.mirror.members.homes import Homes
from megablend.mirror.members.launchers import Members, Pace, is_loopback
from megablend.mirror.members.views import View
from megablend.mirror.node.engine import (
    AwayError,
    Engine,
    Keep,
    Mode,
    Want,
)
from megablend.mirror.node.frames import (
    check_pages,
    pack_json,
    pack_pages,
    unpack_needs,
)
from megablend.mirror.node.needs import Needs
from megablend.mirror.node.source_reads import SourceReader
from megablend.mirror.peers.announcements import Announcements
from megablend.mirror.peers.assembly import Assembly, explain_unknown
from megablend.mirror.peers.busy import BUSY_PATH, BusySources
from megablend.mirror.peers.copies import Copies
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.meeting import ONE_NAME, Agreement, Joining
from megablend.mirror.peers.peer import OtherViewError, Peer
from megablend.mirror.peers.placement import Placement
from megablend.mirror.peers.routes import EndedError, Reading, Routes
from megablend.mirror.peers.server import Handle, PeerServer
from megablend.mirror.peers.signing import (
    Signer,
    Verifier,
    check_openness,
    make_contexts,
    read_secret,
)
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.mirror_values import ALL
from megablend.storage.objects.rate_limiter import MAX_REQUESTS, RateLimiter
from megablend.system.log import LOG

_CANCEL_SECONDS = 0.1
_MAX_BLOCKS = 64
"""The maximum number of blocks of pages that another node may ask for in one request."""


class Cluster:
    """The cluster of a node. Reads pages from the other nodes, and sends pages to them.

    Args:
        options: the settings of the mirror.
        members: the nodes of the cluster, or how to find them.
        source: reads pages from the source.
        get_status: returns the status of this node, for metrics.
        pace: the times after which nodes are treated as unreachable.
        more: additional handlers of requests from other nodes, by method and path.
    """

    def __init__(
        self,
        options: MirrorOptions,
        members: Members,
        source: SourceReader,
        get_status: Callable[[], Awaitable[dict[str, Any]]],
        pace: Pace,
        more: Mapping[tuple[str, str], Handle],
    ) -> None:
        self._options = options
        self._members = members
        self.own = members.own
        """The name of this node."""
        self.views = members.views
        """The membership of this node in a cluster with etcd; None without etcd."""
        self._source = source
        self._pace = pace
        self._secret = read_secret(options)
        self._tls = make_contexts(options.tls)
        self._verifier = Verifier(self._secret, members.own)
        rate = options.max_peer_rate
        self._sending = None if rate is None else RateLimiter(MAX_REQUESTS, rate, 1)
        self._agreement = Agreement(options, members.size, pace)
        self._joining = Joining(members, options.port, self._agreement, self._make_peer, pace)
        self._busy = BusySources(lambda: self._peers.values())
        handlers: dict[tuple[str, str], Handle] = {
            ("POST", "/v1/pages"): self._send_pages,
            ("POST", "/v1/tell"): self._note_pages,
            ("POST", "/v1/due"): self._set_due,
            ("POST", "/v1/join"): self._joining.answer,
            ("POST", "/v1/check"): self._check,
            ("POST", BUSY_PATH): self._busy.hear,
            ("GET", "/v1/ping"): _pong,
            **more,
        }
        self._server = PeerServer(handlers, self._verifier, get_status)
        self._sent_bytes = 0
        self._peers: dict[str, Peer] = {}
        self._assemblies: list[Assembly] = []
        """The assembly of the view in force, or of the first view. It is followed by the assembly
        of the next view, if there is one."""
        self._tasks: list[asyncio.Task[None]] = []
        self.view_listeners: list[Callable[[], None]] = []
        """The functions that are called when a view comes into force."""
        self._engine: Engine
        self._needs: Needs

    async def start(self, engine: Engine, needs: Needs) -> None:
        """Listen for requests of other nodes, and begin to meet the nodes. Raises: ConfigError if
        listening fails."""
        self._engine = engine
        self._needs = needs
        server_tls, client_tls = self._tls or (None, None)
        names = self._members.names or (self.own,)
        check_openness(self._options, names)
        own_host = self.own.rpartition(":")[0].strip("[]")
        host = own_host if all(map(is_loopback, names)) else None
        await self._server.start(host, self._options.port, server_tls)
        connector = aiohttp.TCPConnector(limit=0, ssl=client_tls or True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._pace.silent)
        self._http = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        )
        self._busy.start()
        if self.views is not None:
            self.views.find_away = self.find_away
            try:
                await self.views.start()
            except MegablendError:
                await self.stop()
                raise
        self._start_task(self._run())

    async def stop(self) -> None:
        """Cancel all requests to other nodes, and stop listening."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            # Repeatedly, since `wait_for` loses a cancellation that comes at the moment of its
            # result
            await asyncio.wait(self._tasks, timeout=_CANCEL_SECONDS)
        self._busy.stop()
        # Before the peers are closed: requests that are being answered may need them
        await self._server.stop()
        for peer in self._peers.values():
            peer.close()
        await self._http.close()
        if self.views is not None:
            await self.views.stop()

    async def read(self, want: Want, keep: Keep) -> None:
        """See PageReader.read. Also raises ResourceError while no majority of the nodes is
        connected, and ConfigError if the nodes cannot work together."""

        reading = Reading(want, keep)
        while True:
            await self._agreement.wait()
            routes = self._assemblies[0].routes
            with contextlib.suppress(EndedError):
                await routes.read(reading)
                return

    async def tell_needs(self, needs: Sequence[Need]) -> None:
        """Tell each other node which pages this node will request from it as their home, and
        when."""
        if self._agreement.is_reached:
            await self._assemblies[0].announce_due(needs)

    @property
    def names(self) -> Sequence[str]:
        """The names of all nodes, sorted; empty before the nodes are known."""
        return self._assemblies[0].view.names if self._assemblies else ()

    @property
    def copies(self) -> int:
        """The number of nodes that must hold each page."""
        return self._assemblies[0].placement.copies if self._assemblies else 1

    def find_away(self) -> set[str]:
        """Return the names of the nodes that are unreachable."""
        return {peer.name for peer in self._peers.values() if peer.away_since is not None}

    async def post(self, node: str, path: str, body: bytes) -> bytes:
        """Send a request to another node, and return the body of the response. Raises: AwayError if
        the node is unreachable; the error that the node responds with."""
        if node not in self._peers:
            raise AwayError(f"{node} is not one of the nodes")
        return await self._peers[node].post(path, body)

    async def meet(self) -> None:
        """Wait until the nodes have met. Raises: ResourceError if too few are connected;
        ConfigError if they cannot work together."""
        await self._agreement.wait()

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the cluster, including this one."""
        return len(self.names) if self.views and self.names else self._agreement.size

    @property
    def has_failed(self) -> bool:
        """Whether the nodes cannot work together with their present settings."""
        return self._agreement.failure is not None

    async def select(self, needs: Sequence[Need]) -> list[Need]:
        """Return the pages of needs that this node must hold. Raises: see `meet`."""
        await self.meet()
        return self._assemblies[0].placement.select_own(needs)

    def as_json(self) -> dict[str, Any]:
        """Return the state of the cluster as JSON, for users and metrics."""
        away = sorted(self.find_away())
        views = {} if self.views is None else {"etcd": self.views.as_json()}
        waiting = views["etcd"].get("waiting", "") if views else ""
        status = {
            "own": self.own,
            "nodes": self.num_nodes,
            "view": self._assemblies[0].view.number if self._assemblies else None,
            "away": len(away),
            "away_nodes": away,
            "formed": self._agreement.is_reached,
            "sent_bytes": self._sent_bytes,
            "bad": {each.name: each.num_bad for each in self._peers.values() if each.num_bad},
            **views,
            "trouble": str(self._agreement.failure or self._agreement.too_few or waiting),
        }
        return status | self._assemblies[0].count_debts() if self._assemblies else status

    async def check(self) -> list[str]:
        """Return a line for each case in which one node cannot reach another."""
        lines = await self._check_own()
        for peer in list(self._peers.values()):
            # A node that is away is in this node's own lines
            with contextlib.suppress(AwayError, MegablendError):
                lines += await peer.call("/v1/check", {})
        return lines

    async def _check_own(self) -> list[str]:
        peers = list(self._peers.values())
        await asyncio.gather(*(peer.ping() for peer in peers))
        return [
            f"{self.own} cannot reach {peer.name}: {str(peer.obstacle).splitlines()[0]}"
            for peer in peers
            if peer.obstacle is not None
        ]

    async def _check(self, *_: object) -> bytes:
        return pack_json(await self._check_own())

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            LOG.error("mirror: this is a bug in megablend; please report it", exc_info=error)
            self._agreement.fail(ResourceError(f"the node process failed: {error!r}"))

    async def _run(self) -> None:
        """Find the nodes, and begin to meet them. With etcd, do this for each new view."""
        try:
            if self.views is not None:
                await self._check_address()
                async for view in self.views.follow():
                    self.take(view)
                return
            names = await self._joining.gather()
            await self._check_address()
            if self.own in names:
                self.take(View(0, tuple(names)))
            else:
                self._agreement.fall_short(
                    f"{self.own} joined after the other nodes had started without it"
                )
        except MegablendError as error:
            self._agreement.fail(error)

    def take(self, view: View) -> None:
        """Begin to meet the nodes of a view that includes this node. When they have met, the view
        comes into force; until then, the earlier view stays in force."""
        names = view.names
        others = [name for name in names if name != self.own]
        for name in others:
            if name not in self._peers:
                self._peers[name] = self._make_peer(name)
        peers = {name: self._peers[name] for name in others}
        copies = len(names) if self._options.copies == ALL else int(self._options.copies)
        placement = Placement(names, self.own, copies)
        announcements = Announcements(self._engine, placement, others)
        holders = Holders()
        routes = Routes(
            self._source,
            placement,
            holders,
            announcements,
            peers,
            view.number,
            self.views,
            list(map(Homes, view.earlier)),
            self._pace,
        )
        new = Assembly(
            view,
            self._verifier.session,
            peers,
            placement,
            announcements,
            holders,
            Copies(self._engine, placement, holders),
            routes,
            self._agreement,
            self._joining,
        )
        if self.views is not None:
            self._agreement.size = len(names)
        for each in self._assemblies:
            each.announcements.successor = announcements
            if not each.is_formed:
                each.end()
        self._assemblies = [*(each for each in self._assemblies if each.is_formed), new]
        new.tasks += [self._start_task(new.announce_to(peer)) for peer in peers.values()]
        new.tasks.append(self._start_task(self._meet(new)))

    async def _meet(self, assembly: Assembly) -> None:
        """Put a view into force as soon as its nodes have met."""
        try:
            await assembly.form()
        except ConfigError as error:
            self._agreement.fail(error)
        if not assembly.is_formed or assembly.has_ended:
            return
        for each in self._assemblies:
            if each is not assembly:
                each.end()
        self._assemblies = [assembly]
        for name in self._peers.keys() - assembly.peers.keys():
            self._peers.pop(name).close()
            self._needs.set_of_node(name, [])
        self._agreement.reach()
        self._needs.announce_again()
        for listen in self.view_listeners:
            listen()
        assembly.tasks.append(self._start_task(assembly.copies.run()))

    def _make_peer(self, name: str) -> Peer:
        signer = Signer(self._secret, self.own)

        def meet(peer: Peer) -> None:
            for each in self._assemblies:
                if peer.name in each.peers:
                    each.announcements.news[peer.name].set()
                    each.copies.retry()
                    self._needs.announce_again()

        uses_tls = self._tls is not None
        return Peer(name, self._http, signer, self._pace, meet, self._suspect, uses_tls)

    def _suspect(self) -> None:
        """Send pings to all nodes, because one node has not responded in time. If the network is
        down, all nodes are then found to be unreachable at once, not one after another."""
        for peer in self._peers.values():
            peer.ping_if_silent()

    async def _check_address(self) -> None:
        """Check that no other process responds at this node's address. Raises: ConfigError."""
        own_peer = self._make_peer(self.own)
        responds = await own_peer.ping()
        own_peer.close()
        if responds and own_peer.session != self._verifier.session:
            raise ConfigError(f"{own_peer.name}: another node responds at that address\n{ONE_NAME}")

    async def _note_pages(self, node: str, query: Mapping[str, str], body: bytes) -> bytes:
        needs = unpack_needs(body)
        for need in needs:
            check_pages(need)
        if not self._assemblies:
            raise AwayError("this node does not know the list of nodes yet")
        await self._find_assembly(query, self._assemblies).note_pages(node, query, needs)
        return b""

    def _find_assembly(self, query: Mapping[str, str], assemblies: Sequence[Assembly]) -> Assembly:
        """Return the assembly of the view that a request names, or the first assembly if it names
        no view. Raises: OtherViewError if there is no assembly of that view."""
        for assembly in assemblies:
            if query.get("view") in (None, str(assembly.view.number)):
                return assembly
        raise OtherViewError(
            f"{self.own} is in view {assemblies[0].view.number}, not {query['view']}"
        )

    def _check_left_out(self, node: str, view: str) -> None:
        """Check that a node in an earlier view also belongs to the view in force. A node that does
        not would wait forever for this node to enter its view. Raises: AwayError if it does not."""
        number = self._assemblies[0].view.number
        if node not in self._peers and view.isdecimal() and int(view) < number:
            raise AwayError(f"{self.own} is in view {number}, which does not include {node}")

    async def _send_pages(self, node: str, query: Mapping[str, str], body: bytes) -> bytes:
        (need,) = unpack_needs(body)
        check_pages(need)
        if len(need.due) > _MAX_BLOCKS:
            raise ValueError(f"found {len(need.due)} blocks, expected at most {_MAX_BLOCKS}")
        if self._assemblies:
            if "held" not in query or "settle" in query:
                self._check_left_out(node, query.get("view", ""))
                self._find_assembly(query, self._assemblies[:1])
            if node not in self._peers:
                raise ConfigError(explain_unknown(node, self.own))
        want = Want.of(need, Mode.FRESH if "fresh" in query else Mode.NEEDED)
        if "settle" in query:
            await self._source.settle(want)
        if "held" not in query:
            await self._engine.obtain(want)
        held, data = await self._engine.read_held(want)
        if self._sending is not None:
            await self._sending.enter(len(data))
            self._sending.leave(len(data))
        self._sent_bytes += len(data)
        return pack_pages(held, data)

    async def _set_due(self, node: str, query: Mapping[str, str], body: bytes) -> bytes:
        if node in self._peers:
            self._needs.set_of_node(node, unpack_needs(body), is_more="more" in query)
        return b""


async def _pong(*_: object) -> bytes:
    return b""
