"""The nodes of a cluster that have a lease in etcd, and the views that they agree on.

    nodes/<name>    with the node's lease: its folder, version and protocol
    shared/view     the view: number, nodes, earlier

A node has its name as long as its lease is kept. The first nodes of a view, and those that are not
in it, look whether it is of the nodes that there are, and replace it by one transaction: so there is
one view of each number, and a node that etcd's majority does not hear of makes none. Without etcd
the last view stays in force; a node remembers it in its folder, and goes on with it, and if etcd has
lost it, it is put back.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import megablend
from megablend.errors import CacheError, ConfigError
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.members.etcd import Etcd, EtcdAwayError, Followed, Value
from megablend.mirror.members.views import View, Views, propose
from megablend.mirror.node.frames import PROTOCOL
from megablend.storage.mirror_options import EtcdOptions
from megablend.system.atomic_write import keep_computed
from megablend.system.limited_json import fits, parse_json
from megablend.system.log import LOG

_KINDS = ("nodes/", "shared/", "held/")
_NUM_WATCHERS = 3
_DIFFERING_SECONDS = 2.0
"""For so long a view differs from the nodes that there are before the next one is made: others come
and go with them."""
_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 1.0
_KEPT_SHARE = 3
"""A lease is kept after this part of it."""
_VIEW = {"number": int, "nodes": [str], "earlier": [[str]]}


class EtcdMembers(Views):
    """This node among those of a cluster.

    Args:
        etcd: is asked.
        options: of the cluster.
        own: this node's name.
        folder: of its mirror.
    """

    def __init__(self, etcd: Etcd, options: EtcdOptions, own: str, folder: MirrorFolder) -> None:
        self.etcd = etcd
        self.size = options.nodes_expected
        self.prefix = f"{options.prefix}/v1/"
        """Of all keys."""
        self.shared = Followed(etcd, f"{self.prefix}shared/")
        """What all nodes hear of."""
        self.lease = 0
        """This node's; 0: it has none just now."""
        self._own = own
        self._seconds = options.lease
        self._folder = folder
        self._path = folder.path / "view.json"
        self._root = f"{options.prefix}/"
        self._nodes = f"{self.prefix}nodes/"
        self._place = f"{self.prefix}shared/view"
        self._known = self._load()
        """The latest view that this node has heard of."""
        self._started = time.monotonic()
        self._kept_at = -math.inf
        """Monotonic seconds: the lease lasts since then, or longer."""
        self._trouble = ""
        """What else is where the view should be."""
        self._least = 0
        """Number of the view in etcd when this node took its last lease."""

    async def start(self) -> None:
        """Take this node's name. Raises: ConfigError if a live node has it, or something else is
        below the prefix; EtcdAwayError if this node knows no view to go on with."""
        try:
            for key in await self.etcd.list_keys(self._root):
                if not key.startswith(tuple(self.prefix + kind for kind in _KINDS)):
                    raise ConfigError(
                        f"etcd: found {key!r} below {self._root!r}, which is not a key of megablend\n"
                        "Set `mirror.etcd.prefix` to a prefix that nothing else uses."
                    )
            await self._check_protocols()
            if self._known is None:
                self._read_view((await self.etcd.get(self._place))[0].get(self._place))
            end = time.monotonic() + self._seconds + _DIFFERING_SECONDS
            while not await self._register():
                if time.monotonic() > end:
                    raise ConfigError(
                        f"{self._own}: a running node with another folder has this name\n"
                        "Give each node a name of its own (`advertise`, `port`), or stop the other one."
                    )
                await asyncio.sleep(_RETRY_SECONDS)
        except EtcdAwayError as error:
            if self._known is None:
                raise
            LOG.warning("mirror: going on with view %d: %s", self._known.number, error)

    async def _check_protocols(self) -> None:
        """Raises: ConfigError if there are nodes that would not understand this one."""
        for key, value in (await self.etcd.get(self._nodes))[0].items():
            protocol = _read(value).get("protocol")
            if protocol != PROTOCOL and key != self._nodes + self._own:
                raise ConfigError(
                    f"{key.removeprefix(self._nodes)} speaks protocol {protocol}, but this node speaks {PROTOCOL}\n"
                    "Run a version of megablend with the same protocol; or stop all nodes before the first one of another "
                    "protocol is started."
                )

    async def stop(self) -> None:
        """Ask etcd no more. The lease goes on: a node that starts again soon is the same one."""
        await self.etcd.close()

    async def follow(self) -> AsyncIterator[View]:
        """See Views."""
        tasks = [
            asyncio.ensure_future(_persist(work))
            for work in (self.shared.run, self._keep, self._watch)
        ]
        last = -1
        try:
            while True:
                values = self.shared.values
                self._trouble = ""
                try:
                    found = self._read_view(values.get(self._place))
                except ConfigError as error:
                    if self._known is None:
                        raise
                    # The lease goes on, and so does the view that is in force
                    self._trouble = str(error)
                    LOG.warning("mirror: %s", error)
                    found = None
                if found is not None and (self._known is None or found.number > self._known.number):
                    self._known = found
                    self._store(found)
                is_current = self._known is not None and self._known.number > last
                if (
                    self._known is not None
                    and is_current
                    and (self.shared.revision or not self.lease)
                ):
                    last = self._known.number
                    if self._own in self._known.names:
                        yield self._known
                        continue
                news = asyncio.ensure_future(self.shared.wait_for_change(values))
                done, _ = await asyncio.wait([news, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
        finally:
            for each in tasks:
                each.cancel()

    def find_doubt(self, number: int) -> float | None:
        """See Views."""
        end = self._kept_at + self._seconds
        if time.monotonic() > end:
            # While etcd answers, this node is about to hear of it
            return math.inf if self.etcd.away_since is None else end
        return math.inf if number < self._least else None

    def as_json(self) -> dict[str, Any]:
        """For people and metrics."""
        return {"away_since": self.etcd.away_since, "trouble": self.etcd.trouble or self._trouble}

    async def _register(self) -> bool:
        """Take this node's name with a new lease. Returns: False if another node has it."""
        key = self._nodes + self._own
        known = (await self.etcd.get(key))[0].get(key)
        if known is not None and _read(known).get("folder") != self._folder.id:
            return False
        began = time.monotonic()
        lease = await self.etcd.grant(self._seconds)
        about = {
            "folder": self._folder.id,
            "version": megablend.__version__,
            "protocol": PROTOCOL,
        }
        expected = {key: 0 if known is None else known.revision}
        if await self.etcd.change(expected, {key: _pack(about)}, lease=lease) is None:
            return False
        found = (await self.etcd.get(self._place))[0].get(self._place)
        # If it is no view, `follow` tells that
        view = None if found is None else _view_of(_read(found))
        self._least = 0 if view is None else view.number
        self._kept_at = began
        self.lease = lease
        return True

    async def _keep(self) -> None:
        """Keep the lease, until cancelled; take another one when it has ended."""
        while True:
            try:
                began = time.monotonic()
                if self.lease and await self.etcd.keep(self.lease):
                    self._kept_at = began
                else:
                    self.lease = 0
                    if not await self._register():
                        LOG.warning("mirror: another node has the name %s", self._own)
            except EtcdAwayError:
                pass
            is_well = self.lease and self.etcd.away_since is None
            await asyncio.sleep(self._seconds / _KEPT_SHARE if is_well else _RETRY_SECONDS)

    async def _watch(self) -> None:
        """Propose views, while this node is one of those who do, until cancelled."""
        nodes = Followed(self.etcd, self._nodes)
        following: asyncio.Task[None] | None = None
        since = math.inf
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                if not self._is_watcher():
                    if following is not None:
                        following.cancel()
                        following = None
                    continue
                if following is None:
                    nodes = Followed(self.etcd, self._nodes)
                    following = asyncio.ensure_future(nodes.run())
                if following.done():
                    following.result()
                new = self._propose(nodes) if nodes.revision and self.shared.revision else None
                now = time.monotonic()
                if new is None:
                    since = math.inf
                    continue
                since = min(since, now)
                if self._known is None or now >= since + _DIFFERING_SECONDS:
                    since = math.inf
                    await self._put(new)
        finally:
            if following is not None:
                following.cancel()

    def _is_watcher(self) -> bool:
        """Whether this node is not in the view, or one of the first that answer."""
        names = () if self._known is None else self._known.names
        away = self.find_away()
        there = [name for name in names if name not in away or name == self._own]
        return self._own not in there[_NUM_WATCHERS:]

    def _propose(self, nodes: Followed) -> View | None:
        current = self._read_view(self.shared.values.get(self._place))
        live = [key.removeprefix(self._nodes) for key in nodes.values]
        now = time.monotonic()
        keeps = now < max(self._started, self.etcd.away_at) + self._seconds
        return propose(current, self._known, live, expected=self.size, keeps=keeps)

    async def _put(self, view: View) -> None:
        known = self.shared.values.get(self._place)
        expected = {self._place: 0 if known is None else known.revision}
        await self.etcd.change(expected, {self._place: _pack(_describe(view))})

    def _read_view(self, value: Value | None) -> View | None:
        """Raises: ConfigError if it is none."""
        if value is None:
            return None
        view = _view_of(_read(value))
        if view is None:
            raise ConfigError(
                f"etcd: found {value.data[:80]!r} at {self._place!r}, which is not a view\n"
                "Delete that key, so that the nodes agree on a new view, or set another `mirror.etcd.prefix`."
            )
        return view

    def _load(self) -> View | None:
        """The view of before, of this cluster."""
        try:
            found = parse_json(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        is_ours = isinstance(found, dict) and found.get("root") == self._root
        return _view_of(found) if is_ours else None

    def _store(self, view: View) -> None:
        try:
            keep_computed(self._path, _pack({"root": self._root, **_describe(view)}))
        except CacheError as error:
            LOG.warning("mirror: %s", error)


async def _persist(work: Callable[[], Awaitable[None]]) -> None:
    """Do something until cancelled, and again where etcd refuses: it may be mended."""
    while True:
        try:
            await work()
        except EtcdAwayError:
            pass
        except ConfigError as error:
            LOG.warning("mirror: %s", error)
            await asyncio.sleep(10 * _RETRY_SECONDS)
        await asyncio.sleep(_RETRY_SECONDS)


def _pack(about: dict[str, Any]) -> bytes:
    return json.dumps(about).encode()


def _read(value: Value) -> dict[str, Any]:
    try:
        found = parse_json(value.data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _describe(view: View) -> dict[str, Any]:
    return {"number": view.number, "nodes": view.names, "earlier": view.earlier}


def _view_of(found: dict[str, Any]) -> View | None:
    if not fits(found, _VIEW):
        return None
    return View(found["number"], tuple(found["nodes"]), tuple(map(tuple, found["earlier"])))
