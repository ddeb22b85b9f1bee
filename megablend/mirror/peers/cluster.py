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
from megablend.mirror.disk.pages import BLOCK_BYTES, PAGE_BYTES
from megablend.mirror.members.homes import list_id
from megablend.mirror.members.launchers import Members, is_loopback
from megablend.mirror.members.pace import Pace
from megablend.mirror.node.engine import AwayError, Engine, Keep, Mode, PageReader, Want
from megablend.mirror.node.frames import (
    Need,
    pack_json,
    pack_needs,
    pack_pages,
    unpack_needs,
)
from megablend.mirror.node.needs import Needs
from megablend.mirror.peers.holders import Holders
from megablend.mirror.peers.peer import Peer
from megablend.mirror.peers.routes import Routes, ask_all
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
from megablend.system.limited_json import fits, parse_json
from megablend.system.log import LOG

_MAX_BLOCKS = 64
"""Of a request of another node."""
_JOINING = {"rank": int, "name": str}


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
        handlers: dict[tuple[str, str], Handle] = {
            ("POST", "/v1/pages"): self._give,
            ("POST", "/v1/tell"): self._hear,
            ("POST", "/v1/due"): self._set_due,
            ("POST", "/v1/join"): self._join,
            ("POST", "/v1/check"): self._check,
            ("GET", "/v1/ping"): _pong,
        }
        self._server = PeerServer(handlers, self._verifier, get_status)
        self._peers: dict[str, Peer] = {}
        self._joined: dict[int, str] = {}
        self._list = asyncio.get_running_loop().create_future()
        self._told = set[str]()
        self._heard = set[str]()
        self._is_one_formed = False
        self._news = asyncio.Event()
        self._formed = asyncio.Event()
        self._failure: MegablendError | None = None
        self._too_few = ""
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
        host = "127.0.0.1" if all(map(is_loopback, names)) else None
        await self._server.start(host, self._options.port, server_tls)
        connector = aiohttp.TCPConnector(limit=0, ssl=client_tls or True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._pace.silent)
        self._http = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        )
        self._start_task(self._run())

    async def stop(self) -> None:
        """Ask nobody, and do not listen any more."""
        for task in self._tasks:
            task.cancel()
        for peer in self._peers.values():
            peer.close()
        await self._http.close()
        await self._server.stop()

    async def read(self, want: Want, keep: Keep) -> None:
        """See PageReader.read. Raises: ResourceError while fewer than half of the nodes answer;
        ConfigError if the nodes do not agree."""
        await self._wait_until_formed()
        await self._routes.read(want, keep)

    async def _wait_until_formed(self) -> None:
        await self._formed.wait()
        if self._failure is not None:
            raise self._failure
        if self._too_few:
            raise ResourceError(self._too_few)

    async def tell_needs(self, needs: Sequence[Need]) -> None:
        """Tell homes what this node will ask for."""
        if self._holders is None or not self._formed.is_set():
            return
        loop = asyncio.get_running_loop()
        by_node = await loop.run_in_executor(None, self._holders.divide_by_home, needs)
        bodies = {name: pack_needs(by_node.get(name, [])) for name in self._peers}
        await ask_all(self._peers, "/v1/due", bodies)

    @property
    def num_nodes(self) -> int:
        """Of the cluster, this one too."""
        return self._members.size

    async def select(self, need: Need) -> Need:
        """What this node is a home of. Raises: ResourceError if the nodes have not met."""
        await self._wait_until_formed()
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
            "formed": self._formed.is_set() and not self._too_few and self._failure is None,
            "trouble": str(self._failure or self._too_few),
        }
        return found if self._holders is None else found | self._holders.as_json()

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
            self._fail(ResourceError(f"the node process has a fault: {error!r}"))

    def _fail(self, error: MegablendError) -> None:
        """The nodes cannot work together. Once they do, what one of them says ends nothing."""
        LOG.warning("mirror: %s", error)
        if not self._formed.is_set():
            self._failure = error
            self._formed.set()

    async def _run(self) -> None:
        own = self._members.own
        try:
            names = await self._gather()
            await self._check_address()
        except MegablendError as error:
            self._fail(error)
            return
        if own not in names:
            self._too_few = f"{own}: came after the other nodes had begun without it"
            self._formed.set()
            return
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
            self._told.discard(peer.name)
            if self._holders is not None:
                self._holders.news[peer.name].set()

        return Peer(name, self._http, signer, self._pace, meet, uses_tls=self._tls is not None)

    async def _check_address(self) -> None:
        """Raises: ConfigError if another process answers at this node's name."""
        own = self._make_peer(self._members.own)
        is_there = await own.ping()
        own.close()
        if is_there and own.session != self._verifier.session:
            raise ConfigError(
                f"{own.name}: another node answers there\n"
                "Give each node one name of its own: see `nodes`, `advertise` and `port` of `mirror`."
            )

    async def _gather(self) -> list[str]:
        """The list of nodes: those of a torchrun job tell the first of them their names.
        Raises: ConfigError; ResourceError if too few came."""
        torchrun = self._members.torchrun
        if torchrun is None:
            return list(self._members.names)
        own = self._members.own
        end = time.monotonic() + self._pace.complete
        if not torchrun.rank:
            self._joined[0] = own
            while len(self._joined) < torchrun.size and time.monotonic() < end:
                await self._wait_for_news()
            missing = sorted(set(range(torchrun.size)) - self._joined.keys())
            if missing:
                self._judge([f"machine {rank}" for rank in missing], torchrun.size)
            names = sorted(self._joined.values())
            self._list.set_result(names)
            return names
        first = self._make_peer(torchrun.first)
        try:
            while time.monotonic() < end + self._pace.silent:
                with contextlib.suppress(AwayError):
                    answer = await first.call("/v1/join", {"rank": torchrun.rank, "name": own})
                    return [str(each) for each in answer]
                await asyncio.sleep(self._pace.ping / 2)
        finally:
            first.close()
        raise ResourceError(f"nodes: torch: {first.name} does not answer: {first.trouble}")

    async def _join(self, _: str, __: Mapping[str, str], body: bytes) -> bytes:
        joining = parse_json(body)
        if not fits(joining, _JOINING) or self._members.torchrun is None:
            raise ValueError("a node joins that has no place")
        rank = joining["rank"]
        known = self._joined.setdefault(rank, joining["name"])
        if known != joining["name"] and not self._list.done():
            self._joined[rank] = joining["name"]  # it has started again, elsewhere
        self._news.set()
        return pack_json(await asyncio.shield(self._list))

    async def _tell(self, peer: Peer) -> None:
        """Tell another node what this one holds: all, and then what is new."""
        assert self._holders is not None
        news = self._holders.news[peer.name]
        while True:
            needs: list[Need] = []
            is_first = peer.name not in self._told
            try:
                if is_first:
                    self._told.add(peer.name)
                    needs = await self._holders.find_all(peer.name)
                    formed = int(self._formed.is_set())
                    query = f"list={self._list_id}&session={self._verifier.session}&formed={formed}"
                    await peer.post(f"/v1/tell?{query}", pack_needs(needs))
                    self._news.set()
                elif news.is_set():
                    needs = self._holders.take_untold(peer.name)
                    await peer.post("/v1/tell", pack_needs(needs))
                else:
                    await news.wait()
            except (AwayError, MegablendError) as error:
                if is_first:
                    self._told.discard(peer.name)
                else:
                    self._holders.put_back(peer.name, needs)
                if isinstance(error, MegablendError):
                    self._fail(error)
                    await asyncio.sleep(self._pace.silent)
                await asyncio.sleep(self._pace.ping / 2)

    async def _hear(self, node: str, query: Mapping[str, str], body: bytes) -> bytes:
        needs = unpack_needs(body)
        if self._holders is None:
            raise AwayError("this node does not know the list of nodes yet")
        if "list" in query:
            await self._greet(node, query)
        if node not in self._peers:
            raise ConfigError(f"{node}: is none of the nodes of {self._members.own}\nlist it there")
        await self._holders.hear(node, needs)
        if "list" in query:
            self._heard.add(node)
            self._is_one_formed |= query.get("formed") == "1"
            self._news.set()
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
            raise ConfigError(
                f"{node}: two nodes have this name\n"
                "Give each node one name of its own: see `nodes`, `advertise` and `port` of `mirror`."
            )

    async def _form(self) -> None:
        """Wait until all nodes have met, or enough of them."""
        end = time.monotonic() + self._pace.complete
        while not self._formed.is_set() or self._too_few:
            missing = sorted(self._peers.keys() - (self._heard & self._told))
            are_away = all(self._peers[name].away_since is not None for name in missing)
            if not missing or (self._is_one_formed and are_away):
                self._set_formed()
            elif time.monotonic() > end:
                reasons = [f"{name} ({self._explain(name)})" for name in missing]
                try:
                    self._judge(reasons, self._members.size)
                    self._set_formed()
                except ConfigError as error:
                    self._fail(error)
                    return
                except ResourceError as error:
                    if not self._too_few:
                        LOG.warning("mirror: %s", error)
                    self._too_few = str(error)
                    self._formed.set()
                    await asyncio.sleep(self._pace.ping)
            if not self._formed.is_set():
                await self._wait_for_news()

    def _set_formed(self) -> None:
        self._too_few = ""
        self._formed.set()
        LOG.info("mirror: %d nodes work together", self._members.size)

    def _judge(self, missing: list[str], size: int) -> None:
        """Warn of missing nodes, if a majority is there. Raises: ConfigError with `strict`;
        ResourceError without a majority."""
        text = f"{len(missing)} of {size} nodes are missing: {', '.join(missing[:8])}"
        if self._options.strict:
            raise ConfigError(f"{text}\nstart them, or leave out `strict` of `mirror`")
        if 2 * (size - len(missing)) <= size:
            raise ResourceError(f"{text}: the others are no majority")
        LOG.warning("mirror: %s: going on without them", text)

    def _explain(self, name: str) -> str:
        if name in self._heard:
            return f"it reaches this node, which does not reach it: {self._peers[name].trouble}"
        return self._peers[name].trouble if name not in self._told else "it has told nothing"

    async def _wait_for_news(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), self._pace.ping / 4)
        self._news.clear()

    async def _give(self, _: str, query: Mapping[str, str], body: bytes) -> bytes:
        (need,) = unpack_needs(body)
        key = need.key
        pages = need.pages
        last = int(pages.blocks[-1]) * BLOCK_BYTES if len(pages.blocks) else 0
        last += (int(pages.masks[-1]).bit_length() - 1) * PAGE_BYTES if len(pages.blocks) else 0
        if not 0 < len(pages.blocks) <= _MAX_BLOCKS or last >= key.size or not pages.masks.all():
            raise ValueError(f"pages that a file of {key.size} bytes does not have, or too many")
        mode = Mode.FRESH if "fresh" in query else Mode.NEEDED
        want = Want(key, pages, float(np.min(need.due, initial=math.inf)), mode)
        if "held" not in query:
            await self._engine.obtain(want)
        held, data = await self._engine.read_held(want)
        if self._sending is not None:
            await self._sending.enter(len(data))
            self._sending.leave(len(data))
        return pack_pages(held, data)

    async def _set_due(self, node: str, _: Mapping[str, str], body: bytes) -> bytes:
        if node in self._peers:
            self._needs.set_kept(node, unpack_needs(body))
        return b""


async def _pong(*_: object) -> bytes:
    return b""
