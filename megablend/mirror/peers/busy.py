"""Sources that ask for fewer requests: a node that hears it tells the others."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from megablend.errors import MegablendError
from megablend.mirror.node.engine import AwayError
from megablend.mirror.node.frames import pack_json
from megablend.mirror.peers.peer import Peer
from megablend.storage.objects import clients
from megablend.system.limited_json import fits, parse_json

BUSY_PATH = "/v1/busy"
_SPREAD_SECONDS = 1.0
"""All nodes may hear it from the source at the same time: few of them tell all the others."""
_PATIENCE_SECONDS = 5.0


@dataclass(eq=False)
class BusySources:
    """What nodes tell one another of busy sources."""

    get_peers: Callable[[], Collection[Peer]]
    """The other nodes."""
    _heard: dict[str, float] = field(default_factory=dict)
    """Until when each source is left alone, as others have told, in monotonic seconds."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self) -> None:
        """Tell what this process's requests hear from now on."""
        self._loop = asyncio.get_running_loop()
        clients.busy_listeners.append(self._note)

    def stop(self) -> None:
        """Tell no more."""
        if self._note in clients.busy_listeners:
            clients.busy_listeners.remove(self._note)
        for task in self._tasks:
            task.cancel()

    def _note(self, root: str, seconds: float) -> None:
        """In the thread of the requests."""
        self._loop.call_soon_threadsafe(self._begin, root, time.monotonic() + seconds)

    def _begin(self, root: str, until: float) -> None:
        task = asyncio.ensure_future(self._tell(root, until))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, root: str, until: float) -> None:
        await asyncio.sleep(random.uniform(0, _SPREAD_SECONDS))
        if self._heard.get(root, -math.inf) >= until - _SPREAD_SECONDS:
            return  # who has told this node has told the others
        body = pack_json({"root": root, "seconds": max(0.0, until - time.monotonic())})
        there = [each for each in self.get_peers() if each.away_since is None]
        await asyncio.gather(*(_post(peer, body) for peer in there))

    async def hear(self, _: str, __: Mapping[str, str], body: bytes) -> bytes:
        """Another node tells. Raises: ValueError if it cannot be understood."""
        about = parse_json(body)
        if not fits(about, {"root": str, "seconds": float}) or not math.isfinite(about["seconds"]):
            raise ValueError(f"found {body[:80]!r}, expected a source and seconds")
        self._heard[about["root"]] = time.monotonic() + about["seconds"]
        clients.slow_down(about["root"], about["seconds"])
        return b""


async def _post(peer: Peer, body: bytes) -> None:
    # A node of an earlier version does not know it
    with contextlib.suppress(asyncio.TimeoutError, AwayError, MegablendError):
        await asyncio.wait_for(peer.post(BUSY_PATH, body), _PATIENCE_SECONDS)
