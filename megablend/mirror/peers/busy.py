"""Shares information on busy sources. If a source asks one node for fewer requests, that node
notifies the others."""

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
"""The longest random delay before a node notifies the others. A source may ask all nodes for fewer
requests at the same time, and with random delays only a few of them send notifications."""
_PATIENCE_SECONDS = 5.0


@dataclass(eq=False)
class BusySources:
    """The part of a node that exchanges notifications about busy sources with other nodes."""

    get_peers: Callable[[], Collection[Peer]]
    """Returns the other nodes."""
    _heard: dict[str, float] = field(default_factory=dict)
    """For each source, the monotonic time until which requests are held back because of other
    nodes' notifications."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self) -> None:
        """Start notifying other nodes when a source asks this process for fewer requests."""
        self._loop = asyncio.get_running_loop()
        clients.busy_listeners.append(self._note)

    def stop(self) -> None:
        """Stop notifying other nodes."""
        if self._note in clients.busy_listeners:
            clients.busy_listeners.remove(self._note)
        for task in self._tasks:
            task.cancel()

    def _note(self, root: str, seconds: float) -> None:
        """Schedule a notification that the source `root` is busy for some seconds. Called in the
        thread of a request."""
        self._loop.call_soon_threadsafe(self._begin, root, time.monotonic() + seconds)

    def _begin(self, root: str, until: float) -> None:
        task = asyncio.ensure_future(self._notify(root, until))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self, root: str, until: float) -> None:
        await asyncio.sleep(random.uniform(0, _SPREAD_SECONDS))
        if self._heard.get(root, -math.inf) >= until - _SPREAD_SECONDS:
            return  # the node that notified this one has also notified the others
        body = pack_json({"root": root, "seconds": max(0.0, until - time.monotonic())})
        reachable = [peer for peer in self.get_peers() if peer.away_since is None]
        await asyncio.gather(*(_post(peer, body) for peer in reachable))

    async def hear(self, _: str, __: Mapping[str, str], body: bytes) -> bytes:
        """Handle a notification of another node: hold back requests to the busy source. Raises:
        ValueError if the notification is not valid."""
        message = parse_json(body)
        if not fits(message, {"root": str, "seconds": float}) or not math.isfinite(
            message["seconds"]
        ):
            raise ValueError(f"found {body[:80]!r}, expected a source and seconds")
        self._heard[message["root"]] = time.monotonic() + message["seconds"]
        clients.slow_down(message["root"], message["seconds"])
        return b""


async def _post(peer: Peer, body: bytes) -> None:
    # A node of an earlier version does not know this path
    with contextlib.suppress(asyncio.TimeoutError, AwayError, MegablendError):
        await asyncio.wait_for(peer.post(BUSY_PATH, body), _PATIENCE_SECONDS)
