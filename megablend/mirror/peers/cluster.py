"""The nodes of a cluster, as one of them sees it: they meet, and then read through one another.

Nothing is read before every node of the list has told every other what it holds: who is not up yet
would look dead, and be passed over. After two minutes a majority goes on without the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

from megablend.errors import ConfigError, MegablendError, ResourceError
from megablend.mirror.disk.room import Need
from megablend.mirror.members.homes import list_id
from megablend.mirror.members.launchers import Members, Pace, is_loopback
from megablend.mirror.node.engine import AwayError, Engine, Keep, Mode, PageReader, Want
from megablend.mirror.node.frames import (
    batch_needs,
    check_pages,
    pack_json,
    pack_needs,
    pack_pages,
    unpack_needs,
)
from megablend.mirror.node.needs import Needs
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.meeting import ONE_NAME, Agreement, Joining
from megablend.mirror.peers.peer import Peer
from megablend.mirror.peers.routes import Routes, tell_due
from megablend.mirror.peers.server import Handle, PeerServer
from megablend.mirror.peers.signing import (
    Signer,
    Verifier,
    check_openness,
    make_contexts,
    read_secret,
)
from megablend.storage.mirror_options import ALL, MirrorOptions
from megablend.storage.objects.rate_limiter import MAX_REQUESTS, RateLimiter
from megablend.system.log import LOG

_CANCEL_SECONDS = 0.1
_LOOKS = 5
"""Times `Pace.ping` after which a torchrun job's first machine is looked after."""
_MAX_BLOCKS = 64
"""Of a request of another node."""


class Cluster:
    """Reads pages from other nodes, and serves them.

    Args:
        options: of the mirror.
        members: which nodes there are.
        source: reads the source.
        get_status: numbers of this node.
        pace: when others are away.
    """

    def __init__(
        self,
        options: MirrorOptions,
        members: Members,
        source: PageReader,
        get_status: Callable[[], Awaitable[Mapping[str, Any]]],
        pace: Pace = Pace(),  # noqa: B008  (a tuple)
    ) -> None:
        self._options = options
        self._members = members
        self._source = source
        self._pace = pace
        self._secret = read_secret(options)
        self._tls = make_contexts(options)
        self._verifier = Verifier(self._secret, members.own)
        rate = options.max_peer_rate
        self._sending = None if rate is None else RateLimiter(MAX_REQUESTS, rate, 1)
        self._agreement = Agreement(options, members.size, pace)
        self._joining = Joining(members, options.port, self._agreement, self._make_peer, pace)
        handlers: dict[tuple[str, str], Handle] = {
            ("POST", "/v1/pages"): self._give,
            ("POST", "/v1/tell"): self._hear,
            ("POST", "/v1/due"): self._set_due,
            ("POST", "/v1/join"): self._joining.answer,
            ("POST", "/v1/check"): self._check,
            ("GET", "/v1/ping"): _pong,
        }
        self._server = PeerServer(handlers, self._verifier, get_status)
        self._peers: dict[str, Peer] = {}
        self._told: dict[str, str] = {}
        """Nodes that know what this one holds, and their sessions."""
        self._heard = set[str]()
        self._is_one_formed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._engine: Engine
        self._needs: Needs
        self._holders: Holders | None = None
        self._routes: Routes

    async def start(self, engine: Engine, needs: Needs) -> None:
        """Listen to the others, and begin to meet them. Raises: ConfigError if that cannot be."""
        self._engine = engine
        self._needs = needs
        server_tls, client_tls = self._tls or (None, None)
        names = self._members.names or (self._members.own,)
        check_openness(self._options, names)
        own_host = self._members.own.rpartition(":")[0].strip("[]")
        host = own_host if all(map(is_loopback, names)) else None
        await self._server.start(host, self._options.port, server_tls)
        connector = aiohttp.TCPConnector(limit=0, ssl=client_tls or True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._pace.silent)
        self._http = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        )
        self._start_task(self._run())

    async def stop(self) -> None:
        """Ask nobody, and do not listen any more."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            # Again, since `wait_for` loses a cancellation that comes with what it waits for
            await asyncio.wait(self._tasks, timeout=_CANCEL_SECONDS)
        # What is being answered may need the others
        await self._server.stop()
        for peer in self._peers.values():
            peer.close()
        await self._http.close()

    async def read(self, want: Want, keep: Keep) -> None:
        """See PageReader.read. Raises: ResourceError while fewer than half of the nodes answer;
        ConfigError if the nodes do not agree."""
        await self._agreement.wait()
        await self._routes.read(want, keep)

    async def tell_needs(self, needs: Sequence[Need]) -> None:
        """Tell homes what this node will ask for."""
        if self._holders is None or not self._agreement.is_reached:
            return
        loop = asyncio.get_running_loop()
        by_node = await loop.run_in_executor(None, self._holders.divide_by_home, needs)
        batches = {name: list(batch_needs(by_node.get(name, []))) for name in self._peers}
        await tell_due(self._peers, batches)

    @property
    def num_nodes(self) -> int:
        """Of the cluster, this one too."""
        return self._members.size

    @property
    def has_failed(self) -> bool:
        """Whether the nodes cannot work together as they are."""
        return self._agreement.failure is not None

    async def select(self, need: Need) -> Need:
        """What this node is a home of. Raises: ResourceError if the nodes have not met."""
        await self._agreement.wait()
        assert self._holders is not None
        return self._holders.select_own(need)

    def as_json(self) -> dict[str, Any]:
        """For people and metrics."""
        away = [each.name for each in self._peers.values() if each.away_since is not None]
        found = {
            "own": self._members.own,
            "nodes": self._members.size,
            "away": len(away),
            "away_nodes": away,
            "formed": self._agreement.is_reached,
            "trouble": str(self._agreement.failure or self._agreement.too_few),
        }
        return found if self._holders is None else found | self._holders.count_debts()

    async def check(self) -> list[str]:
        """A line for each pair of nodes that cannot talk."""
        lines = await self._check_own()
        for peer in list(self._peers.values()):
            # Who does not answer is in the lines of this node
            with contextlib.suppress(AwayError, MegablendError):
                lines += await peer.call("/v1/check", {})
        return lines

    async def _check_own(self) -> list[str]:
        peers = list(self._peers.values())
        answers = await asyncio.gather(*(peer.ping() for peer in peers))
        return [
            f"{self._members.own} does not reach {peer.name}: {peer.trouble}"
            for peer, is_there in zip(peers, answers, strict=True)
            if not is_there
        ]

    async def _check(self, *_: object) -> bytes:
        return pack_json(await self._check_own())

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("mirror: a fault of megablend", exc_info=error)
            self._agreement.fail(ResourceError(f"the node process has a fault: {error!r}"))

    async def _run(self) -> None:
        try:
            names = await self._joining.gather()
            await self._check_address()
            if self._members.own in names:
                await self._meet(names)
            else:
                self._agreement.fall_short(
                    f"{self._members.own}: came after the others had begun without it"
                )
        except MegablendError as error:
            self._agreement.fail(error)

    async def _meet(self, names: Sequence[str]) -> None:
        """Tell the others, and wait for them. Raises: ConfigError with `strict`."""
        own = self._members.own
        copies = len(names) if self._options.copies == ALL else int(self._options.copies)
        self._list_id = list_id(names)
        self._peers = {name: self._make_peer(name) for name in names if name != own}
        self._holders = Holders(self._engine, names, own, copies)
        self._routes = Routes(self._source, self._holders, self._peers, own)
        for peer in self._peers.values():
            self._start_task(self._tell(peer))
        self._start_task(self._holders.copy())
        await self._form()

    def _make_peer(self, name: str) -> Peer:
        signer = Signer(self._secret, self._members.own)

        def meet(peer: Peer) -> None:
            if self._holders is not None:
                self._holders.news[peer.name].set()
                self._holders.retry()
                self._needs.tell_again()

        uses_tls = self._tls is not None
        return Peer(name, self._http, signer, self._pace, meet, self._suspect, uses_tls)

    def _suspect(self) -> None:
        """A node does not answer at once. If it is the network, others do not, either: they are not
        waited for one after another."""
        for peer in self._peers.values():
            peer.check()

    async def _check_address(self) -> None:
        """Raises: ConfigError if another process answers at this node's name."""
        own = self._make_peer(self._members.own)
        is_there = await own.ping()
        own.close()
        if is_there and own.session != self._verifier.session:
            raise ConfigError(f"{own.name}: another node answers there\n{ONE_NAME}")

    async def _tell(self, peer: Peer) -> None:
        """Tell another node what this one holds: all, and then what is new."""
        assert self._holders is not None
        news = self._holders.news[peer.name]
        while True:
            needs: list[Need] = []
            session = peer.session
            is_first = self._told.get(peer.name) != session
            try:
                query = ""
                if peer.away_since is not None:
                    # To look for all that is held takes long where that is much
                    raise peer.refusal or AwayError(peer.trouble)
                if is_first:
                    await self._joining.join(peer)
                    needs = await self._holders.find_all(peer.name)
                    query = f"?list={self._list_id}&session={self._verifier.session}&formed={int(self._agreement.is_reached)}"
                elif news.is_set():
                    needs = self._holders.take_untold(peer.name)
                elif self._joining.is_first(peer):
                    # After it has started again it knows nobody: others have to notice
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(news.wait(), _LOOKS * self._pace.ping)
                    if not news.is_set():
                        await peer.ping()
                    continue
                else:
                    await news.wait()
                    continue
                *parts, last = batch_needs(needs)
                for part in parts:
                    await peer.post("/v1/tell", pack_needs(part))
                await peer.post(f"/v1/tell{query}", pack_needs(last))
                if session in ("", peer.session):
                    self._told[peer.name] = peer.session
                self._agreement.note_news()
            except (AwayError, MegablendError) as error:
                if not is_first:
                    self._holders.put_back(peer.name, needs)
                if isinstance(error, MegablendError):
                    self._agreement.fail(error)
                    await asyncio.sleep(self._pace.silent)
                await asyncio.sleep(self._pace.ping / 2)

    async def _hear(self, node: str, query: Mapping[str, str], body: bytes) -> bytes:
        needs = unpack_needs(body)
        for key, pages, _ in needs:
            check_pages(key, pages)
        if self._holders is None:
            raise AwayError("this node does not know the list of nodes yet")
        if "list" in query:
            await self._greet(node, query)
        if node not in self._peers:
            raise ConfigError(_is_unknown(node, self._members.own))
        await self._holders.hear(node, needs)
        if "list" in query:
            self._heard.add(node)
            self._is_one_formed |= query.get("formed") == "1"
            self._agreement.note_news()
        return b""

    async def _greet(self, node: str, query: Mapping[str, str]) -> None:
        """Raises: ConfigError if another node has another list, or the name of a third one."""
        if query["list"] != self._list_id:
            raise ConfigError(
                f"{node}: has another list of nodes than {self._members.own}\n"
                "Give all nodes the same `nodes`, and stop the node processes of earlier jobs (`megablend node stop`)."
            )
        peer = self._peers.get(node)
        session = query.get("session")
        if peer is None or session in ("", peer.session):
            return
        # It has started again, unless somebody else has its name
        if await peer.ping() and peer.session != session:
            raise ConfigError(f"{node}: two nodes have this name\n{ONE_NAME}")

    async def _form(self) -> None:
        """Wait until all nodes have met, or enough of them. Raises: ConfigError with `strict`."""
        end = time.monotonic() + self._pace.complete
        while not self._agreement.is_reached:
            missing = sorted(
                name
                for name, peer in self._peers.items()
                if name not in self._heard or self._told.get(name) != peer.session
            )
            are_away = all(self._peers[name].away_since is not None for name in missing)
            if (
                not missing
                or (self._is_one_formed and are_away)
                or (
                    time.monotonic() > end
                    and self._agreement.failure is None
                    and self._agreement.is_enough(
                        [f"{name} ({self._explain(name)})" for name in missing]
                    )
                )
            ):
                self._agreement.reach()
                self._needs.tell_again()
            else:
                await self._agreement.wait_for_news()

    def _explain(self, name: str) -> str:
        if name in self._heard:
            return f"it reaches this node, which does not reach it: {self._peers[name].trouble}"
        return self._peers[name].trouble if name not in self._told else "it has told nothing"

    async def _give(self, node: str, query: Mapping[str, str], body: bytes) -> bytes:
        (need,) = unpack_needs(body)
        key = need.key
        pages = need.pages
        check_pages(key, pages)
        if len(pages.blocks) > _MAX_BLOCKS:
            raise ValueError(f"{len(pages.blocks)} blocks, expected at most {_MAX_BLOCKS}")
        if self._holders is not None and node not in self._peers:
            raise ConfigError(_is_unknown(node, self._members.own))
        mode = Mode.FRESH if "fresh" in query else Mode.NEEDED
        want = Want(key, pages, float(np.min(need.due, initial=math.inf)), mode)
        if "held" not in query:
            await self._engine.obtain(want)
        held, data = await self._engine.read_held(want)
        if self._sending is not None:
            await self._sending.enter(len(data))
            self._sending.leave(len(data))
        return pack_pages(held, data)

    async def _set_due(self, node: str, query: Mapping[str, str], body: bytes) -> bytes:
        if node in self._peers:
            self._needs.set_kept(node, unpack_needs(body), is_more="more" in query)
        return b""


def _is_unknown(node: str, own: str) -> str:
    return f"{node}: is none of the nodes of {own}\nlist it there"


async def _pong(*_: object) -> bytes:
    return b""
