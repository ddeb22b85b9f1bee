"""The list of nodes: given, or what the machines of a torchrun job tell the first of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping

from megablend.errors import ConfigError
from megablend.mirror.members.launchers import Members, Pace, Torchrun, make_name
from megablend.mirror.node.engine import AwayError
from megablend.mirror.node.frames import pack_json
from megablend.mirror.peers.agreement import Agreement
from megablend.mirror.peers.peer import Peer
from megablend.system.limited_json import fits, parse_json

ONE_NAME = "Give each node one name of its own: see `nodes`, `advertise` and `port` of `mirror`."
_JOINING = {"rank": int, "name": str}


class Joining:
    """Finds the list of nodes.

    Args:
        members: what this node knows of it.
        port: of nodes whose names have none.
        agreement: told if too few have come.
        make_peer: a node by its name.
        pace: how long they are waited for.
    """

    def __init__(
        self,
        members: Members,
        port: int,
        agreement: Agreement,
        make_peer: Callable[[str], Peer],
        pace: Pace,
    ) -> None:
        self._members = members
        self._port = port
        self._agreement = agreement
        self._make_peer = make_peer
        self._pace = pace
        self._joined: dict[int, str] = {}
        self._list = asyncio.get_running_loop().create_future()

    async def gather(self) -> list[str]:
        """The list of nodes: those of a torchrun job tell the first of them their names.
        Raises: ConfigError."""
        torchrun = self._members.torchrun
        if torchrun is None:
            return list(self._members.names)
        if torchrun.rank:
            return await self._ask_for_list(torchrun)
        try:
            names = await self._collect(torchrun)
        except ConfigError as error:
            self._list.set_exception(error)
            self._list.exception()  # perhaps nobody asks for it
            raise
        self._list.set_result(names)
        return names

    async def _collect(self, torchrun: Torchrun) -> list[str]:
        """What the machines of a job say that their names are. Raises: ConfigError."""
        end = time.monotonic() + self._pace.complete
        self._joined[0] = self._members.own
        while len(self._joined) < torchrun.size:
            missing = sorted(set(range(torchrun.size)) - self._joined.keys())
            if time.monotonic() > end and self._agreement.is_enough(
                [f"machine {i}" for i in missing]
            ):
                break
            await self._agreement.wait_for_news()
            if self._agreement.lacks_nodes and len(missing) > torchrun.size - len(self._joined):
                # Others come with it: who is not in the list stays outside
                end = time.monotonic() + self._pace.complete
        names = sorted(self._joined.values())
        for name, other in itertools.pairwise(names):
            if name == other:
                raise ConfigError(f"{name}: two machines have this name\n{ONE_NAME}")
        return names

    async def _ask_for_list(self, torchrun: Torchrun) -> list[str]:
        """The list, from the job's first machine. Raises: ConfigError."""
        end = time.monotonic() + self._pace.complete + self._pace.silent
        first = self._make_peer(torchrun.first)
        try:
            while True:
                try:
                    return await self.join(first)
                except AwayError as error:
                    if time.monotonic() > end:
                        self._agreement.fall_short(f"{first.name} has no list of nodes: {error}")
                await asyncio.sleep(self._pace.ping / 2)
        finally:
            first.close()

    async def join(self, peer: Peer) -> list[str]:
        """The list, if the other node is the job's first machine, which does not know it after it has
        started again. Raises: as Peer.post; AwayError while others are missing."""
        torchrun = self._members.torchrun
        if torchrun is None or peer.name != torchrun.first:
            return []
        joining = {"rank": torchrun.rank, "name": self._members.own}
        return [str(each) for each in await peer.call("/v1/join", joining)]

    async def answer(self, _: str, __: Mapping[str, str], body: bytes) -> bytes:
        """A machine joins: answered by the list, when it is complete. Raises: ValueError if it has no
        place; AwayError while others are missing; ConfigError if they do not agree."""
        joining = parse_json(body)
        torchrun = self._members.torchrun
        if torchrun is None or torchrun.rank or not fits(joining, _JOINING):
            raise ValueError("a node joins that has no place")
        rank = joining["rank"]
        if not 0 < rank < torchrun.size:
            raise ValueError(f"machine {rank} joins, expected 1 to {torchrun.size - 1}")
        if not self._list.done():
            # Perhaps it has started again, elsewhere
            self._joined[rank] = make_name(joining["name"], self._port)
        self._agreement.note_news()
        await asyncio.wait([self._list], timeout=self._pace.silent)
        if not self._list.done():
            raise AwayError("not all nodes have come")
        return pack_json(self._list.result())
