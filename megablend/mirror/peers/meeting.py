"""How the nodes of a cluster find one another, and agree to work together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megablend.errors import ConfigError, MegablendError, ResourceError
from megablend.mirror.members.launchers import Members, Pace, Torchrun, make_name
from megablend.mirror.node.engine import AwayError
from megablend.mirror.node.frames import pack_json
from megablend.mirror.peers.peer import Peer
from megablend.storage.mirror_options import MirrorOptions
from megablend.system.limited_json import fits, parse_json
from megablend.system.log import LOG

ONE_NAME = "give each node a different name (`nodes`, `advertise` and `port` under `mirror`)"
_JOINING = {"rank": int, "name": str}


@dataclass(eq=False)
class Agreement:
    """Whether the nodes work together, as far as this node knows. At first this is unknown. Later
    they either work together, or do not: too few are connected, or there is an error."""

    options: MirrorOptions
    size: int
    """The number of nodes of the cluster."""
    pace: Pace
    failure: MegablendError | None = None
    """The error that prevents the nodes from working together with their settings; None if there is
    none."""
    too_few: str = ""
    """The message about missing nodes if too few are connected; "" otherwise."""
    _decided: asyncio.Event = field(default_factory=asyncio.Event)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_reached(self) -> bool:
        """Whether the nodes work together. If not, this node keeps waiting for the others even
        after a failure, since the user may fix the cause."""
        return self._decided.is_set() and not self.too_few and self.failure is None

    async def wait(self) -> None:
        """Wait until it is known whether the nodes work together. Raises: ResourceError if too few
        are connected; ConfigError if they cannot work together."""
        await self._decided.wait()
        if self.failure is not None:
            raise self.failure
        if self.too_few:
            raise ResourceError(self.too_few)

    def reach(self) -> None:
        """Record that the nodes work together from now on."""
        self.too_few = ""
        self.failure = None
        self._decided.set()
        LOG.info("mirror: %d nodes have formed a cluster", self.size)

    def fail(self, error: MegablendError) -> None:
        """Record the error that prevents the nodes from working together. If they already work
        together, only log the error."""
        LOG.warning("mirror: %s", error)
        if not self._decided.is_set():
            self.failure = error
            self._decided.set()

    def is_enough(self, missing: list[str]) -> bool:
        """Return whether a majority of the nodes is connected, so that they can continue without
        the missing nodes. Raises: ConfigError if `strict` is set.

        Args:
            missing: the names of the missing nodes, with explanations.
        """
        text = f"{len(missing)} of {self.size} nodes are missing: {', '.join(missing[:8])}"
        if 2 * (self.size - len(missing)) <= self.size:
            self.fall_short(f"{text}; the others are not a majority")
            return False
        if self.options.strict:
            self.fall_short(text)
        LOG.warning("mirror: %s; continuing without them", text)
        return True

    def fall_short(self, text: str) -> None:
        """Make reads fail with the message `text` until more nodes have joined, so that ranks read
        the source themselves. Do nothing if the nodes already work together. Raises: ConfigError if
        `strict` is set."""
        if self.is_reached:
            return
        if self.options.strict:
            raise ConfigError(f"{text}\nstart the missing nodes, or remove `mirror.strict`")
        if not self.too_few:
            LOG.warning("mirror: %s", text)
        self.too_few = text
        self._decided.set()

    def note_news(self) -> None:
        """Wake the callers of `wait_for_news`, since something about other nodes has changed."""
        self._news.set()

    async def wait_for_news(self) -> None:
        """Wait until something about other nodes has changed, or for a quarter of `pace.ping`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), self.pace.ping / 4)
        self._news.clear()


@dataclass(eq=False)
class Joining:
    """Finds the list of nodes. It is given in the settings, or collected by the first machine of a
    torchrun job: all machines send their names to the first machine, which responds with the
    list."""

    members: Members
    port: int
    """The default port of nodes."""
    agreement: Agreement
    make_peer: Callable[[str], Peer]
    pace: Pace
    _joined: dict[int, str] = field(default_factory=dict)
    """On the job's first machine, the names of the nodes that have joined, by rank."""
    _list: asyncio.Future[list[str]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def gather(self) -> list[str]:
        """Return the names of all nodes. Raises: ConfigError if they cannot be found."""
        torchrun = self.members.torchrun
        if torchrun is None:
            return list(self.members.names)
        if torchrun.rank:
            return await self._ask_for_list(torchrun)
        try:
            names = await self._collect(torchrun)
        except ConfigError as error:
            self._list.set_exception(error)
            # Marks the error as seen: perhaps no machine asks for the list
            self._list.exception()
            raise
        self._list.set_result(names)
        return names

    async def _collect(self, torchrun: Torchrun) -> list[str]:
        """Collect the names of a job's machines. This is called on the first machine.

        Raises: ConfigError if two machines have the same name, or if machines are missing and
            `strict` is set.
        """
        deadline = time.monotonic() + self.pace.complete
        self._joined[0] = self.members.own
        while len(self._joined) < torchrun.size:
            missing = sorted(set(range(torchrun.size)) - self._joined.keys())
            is_late = time.monotonic() > deadline
            if is_late and self.agreement.is_enough([f"machine {rank}" for rank in missing]):
                break
            await self.agreement.wait_for_news()
            if self.agreement.too_few and len(missing) > torchrun.size - len(self._joined):
                # A machine has joined, and more may follow, which must be in the list
                deadline = time.monotonic() + self.pace.complete
        names = sorted(self._joined.values())
        for name, other in itertools.pairwise(names):
            if name == other:
                raise ConfigError(f"{name}: two machines have this name\n{ONE_NAME}")
        return names

    async def _ask_for_list(self, torchrun: Torchrun) -> list[str]:
        """Request the list of nodes from the first machine of the job.

        Raises: ConfigError if that machine does not respond in time and `strict` is set; the error
            that it responds with.
        """
        deadline = time.monotonic() + self.pace.complete + self.pace.silent
        first = self.make_peer(torchrun.first)
        try:
            while True:
                try:
                    return await self.join(first)
                except AwayError as error:
                    if time.monotonic() > deadline:
                        self.agreement.fall_short(
                            f"cannot get the list of nodes from {first.name}: {error}"
                        )
                await asyncio.sleep(self.pace.ping / 2)
        finally:
            first.close()

    def is_first(self, peer: Peer) -> bool:
        """Return whether a node is the first machine of a torchrun job."""
        torchrun = self.members.torchrun
        return torchrun is not None and peer.name == torchrun.first

    async def join(self, peer: Peer) -> list[str]:
        """Send this node's name to a peer that is the first machine of the job, which needs the
        name again after each restart. Returns: the list of nodes; an empty list if the peer is
        another machine. Raises: the errors of `Peer.post`; AwayError while other nodes are
        missing."""
        torchrun = self.members.torchrun
        if torchrun is None or not self.is_first(peer):
            return []
        joining = {"rank": torchrun.rank, "size": torchrun.size, "name": self.members.own}
        return [str(member) for member in await peer.call("/v1/join", joining)]

    async def answer(self, _: str, __: Mapping[str, str], body: bytes) -> bytes:
        """Record the name of a machine that joins, and respond with the list of nodes once it is
        complete. Raises: ValueError if the machine's rank is not valid; AwayError while other
        machines are missing, or if this node process belongs to another job and will exit;
        ConfigError if two machines have the same name."""
        joining = parse_json(body)
        torchrun = self.members.torchrun
        if torchrun is None or torchrun.rank or not fits(joining, _JOINING):
            raise ValueError("not a valid request to join the first machine of a torchrun job")
        # Nodes of earlier versions do not send the size
        if joining.get("size", torchrun.size) != torchrun.size:
            raise AwayError(f"this node process belongs to a job of {torchrun.size} machines")
        rank = joining["rank"]
        if not 0 < rank < torchrun.size:
            raise ValueError(f"found machine rank {rank}, expected 1 to {torchrun.size - 1}")
        if not self._list.done():
            # A later name replaces an earlier one: the machine may have been replaced
            self._joined[rank] = make_name(joining["name"], self.port)
        self.agreement.note_news()
        await asyncio.wait([self._list], timeout=self.pace.silent)
        if not self._list.done():
            raise AwayError("not all nodes have joined")
        return pack_json(self._list.result())
