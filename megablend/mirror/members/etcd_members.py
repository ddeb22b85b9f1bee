"""Maintains the views of a cluster, which are numbered lists of its live nodes, in etcd.

    nodes/<name>    with the node's lease: its folder, version and protocol
    shared/view     the view: number, nodes, earlier

A node owns its name as long as it renews its lease. The first nodes of a view, and nodes that are
not in the view, compare it with the nodes that have leases. If they differ, the view is replaced in
a transaction. So there is only one view with each number, and a node that cannot reach a majority
of etcd's members makes no view. While etcd is unreachable, the last view stays in force. Each node
stores it in its folder, continues with it after a restart, and puts it back if etcd has lost it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import megablend
from megablend.errors import CacheError, ConfigError
from megablend.mirror.disk.folder import MirrorFolder
from megablend.mirror.members.etcd import Etcd, EtcdAwayError, Value
from megablend.mirror.members.followed import Followed
from megablend.mirror.members.views import View, propose
from megablend.mirror.node.frames import PROTOCOL, pack_json
from megablend.storage.mirror_options import EtcdOptions
from megablend.system.atomic_write import keep_computed
from megablend.system.limited_json import fits, parse_json
from megablend.system.log import LOG

_KINDS = ("nodes/", "shared/", "held/")
_NUM_PROPOSERS = 3
"""The number of nodes of a view that propose the next view. One would not be enough, since it may
hang."""
_DIFFERING_SECONDS = 2.0
"""Seconds for which a view must differ from the nodes that have leases before it is replaced, since
nodes often join or leave together."""
_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 1.0
_SHOWN_NAMES = 20
_NUM_RENEWALS = 3
"""The number of times that a lease is renewed within its duration."""
_VIEW = {"number": int, "nodes": [str], "earlier": [[str]]}


class EtcdMembers:
    """The membership of one node in a cluster: keeps the node's lease, follows the views of the
    cluster, and proposes views.

    Args:
        etcd: the client of etcd.
        options: the settings of the cluster.
        own: this node's name.
        folder: the folder of this node's mirror.
    """

    def __init__(self, etcd: Etcd, options: EtcdOptions, own: str, folder: MirrorFolder) -> None:
        self.etcd = etcd
        self.size = options.nodes_expected
        """The number of nodes to wait for before the first view is made."""
        self.prefix = f"{options.prefix}/v1/"
        """The prefix of all keys."""
        self.shared = Followed(etcd, f"{self.prefix}shared/")
        """The keys below `shared/`, which all nodes follow."""
        self.lease = 0
        """The id of this node's lease; 0 while it has none."""
        self.find_away: Callable[[], Collection[str]] = lambda: ()
        """Returns the names of the nodes that this node cannot reach."""
        self._joined: Collection[str] = ()
        """The nodes that had leases when this node last compared them with the view."""
        self._own = own
        self._seconds = options.lease
        self._folder = folder
        self._path = folder.path / "view.json"
        self._root = f"{options.prefix}/"
        self._nodes_prefix = f"{self.prefix}nodes/"
        self._view_key = f"{self.prefix}shared/view"
        self._latest = self._load()
        """The latest view that this node knows; None before the first one."""
        self._started_at = time.monotonic()
        self._renewed_at = -math.inf
        """The monotonic time at which this node last requested a lease, or renewed it."""
        self._trouble = ""
        """Why the value of the key `shared/view` is not a valid view; empty if it is valid."""
        self._least_number = 0
        """The number of the view in etcd when this node last got a lease."""

    async def start(self) -> None:
        """Register this node's name in etcd. Raises: ConfigError if a live node has the same name,
        a node uses another protocol, or the prefix contains keys of other programs; EtcdAwayError
        if etcd is unreachable and this node has not stored a view."""
        try:
            for key in await self.etcd.list_keys(self._root):
                if not key.startswith(tuple(self.prefix + kind for kind in _KINDS)):
                    raise ConfigError(
                        f"etcd: found {key!r} below {self._root!r}, which is not a key of megablend\n"
                        "set `mirror.etcd.prefix` to a prefix that nothing else uses"
                    )
            await self._check_protocols()
            if self._latest is None:
                self._read_view(await self._get(self._view_key))
            end = time.monotonic() + self._seconds + _DIFFERING_SECONDS
            while not await self._register():
                if time.monotonic() > end:
                    raise ConfigError(
                        f"{self._own}: a running node with another folder has this name\n"
                        "give each node its own name with `advertise` and `port`, or stop the other node"
                    )
                await asyncio.sleep(_RETRY_SECONDS)
        except EtcdAwayError as error:
            if self._latest is None:
                raise
            LOG.warning("mirror: continuing with view %d: %s", self._latest.number, error)

    async def _check_protocols(self) -> None:
        """Check that all nodes use the same protocol as this node. Raises: ConfigError."""
        values, _ = await self.etcd.get(self._nodes_prefix)
        for key, value in values.items():
            protocol = _parse(value).get("protocol")
            if protocol != PROTOCOL and key != self._nodes_prefix + self._own:
                raise ConfigError(
                    f"{key.removeprefix(self._nodes_prefix)} speaks protocol {protocol}, but this node speaks {PROTOCOL}\n"
                    "run versions of megablend with the same protocol, or stop all nodes before you start one with another "
                    "protocol"
                )

    async def stop(self) -> None:
        """Close the connections to etcd. The lease is kept, so that a node that is restarted soon
        keeps its name."""
        await self.etcd.close()

    async def follow(self) -> AsyncIterator[View]:
        """Yield each new view that includes this node. Raises: ConfigError."""
        tasks = [
            asyncio.ensure_future(_persist(work))
            for work in (self.shared.run, self._keep_lease, self._propose_views)
        ]
        last_number = -1
        try:
            while True:
                values = self.shared.values
                self._update_latest(values.get(self._view_key))
                latest = self._latest
                # With a lease, etcd's view is read before a stored one is used
                is_ready = self.shared.revision or not self.lease
                if latest is not None and latest.number > last_number and is_ready:
                    last_number = latest.number
                    if self._own in latest.names:
                        yield latest
                        continue
                news = asyncio.ensure_future(self.shared.wait_for_change(values))
                done, _ = await asyncio.wait([news, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()

    def _update_latest(self, value: Value | None) -> None:
        """Replace the latest known view by the view in etcd if that has a higher number. Raises:
        ConfigError if the value is not a view, and this node knows no view."""
        self._trouble = ""
        try:
            view = self._read_view(value)
        except ConfigError as error:
            if self._latest is None:
                raise
            # The lease and the view in force continue
            self._trouble = str(error)
            LOG.warning("mirror: %s", error)
            return
        if view is not None and (self._latest is None or view.number > self._latest.number):
            self._latest = view
            self._store(view)

    def find_doubt(self, number: int) -> float | None:
        """Return the time after which the other nodes may have agreed on a later view without this
        node.

        Args:
            number: the number of the view that is in force on this node.

        Returns: a monotonic time; None if there cannot be a later view; infinity if this node must
            assume that there is one.
        """
        lease_end = self._renewed_at + self._seconds
        if time.monotonic() > lease_end:
            # If etcd responds, this node is about to take another lease and to read the view
            return math.inf if self.etcd.away_since is None else lease_end
        return math.inf if number < self._least_number else None

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON, for users and metrics."""
        names = ", ".join(sorted(self._joined)[:_SHOWN_NAMES])
        joined = f"{len(self._joined)} of {self.size} nodes have joined: {names}"
        return {
            "away_since": self.etcd.away_since,
            "trouble": self.etcd.trouble or self._trouble,
            "waiting": joined if self._latest is None else "",
        }

    async def _register(self) -> bool:
        """Register this node's name with a new lease. Returns: False if another node has it."""
        key = self._nodes_prefix + self._own
        earlier = await self._get(key)
        if earlier is not None and _parse(earlier).get("folder") != self._folder.id:
            return False
        began = time.monotonic()
        lease = await self.etcd.grant(self._seconds)
        about = {
            "folder": self._folder.id,
            "version": megablend.__version__,
            "protocol": PROTOCOL,
        }
        expected = {key: 0 if earlier is None else earlier.revision}
        if await self.etcd.change(expected, {key: pack_json(about)}, lease=lease) is None:
            return False
        value = await self._get(self._view_key)
        # If the value is not a view, `follow` reports that
        view = None if value is None else _make_view(_parse(value))
        self._least_number = 0 if view is None else view.number
        self._renewed_at = began
        self.lease = lease
        return True

    async def _get(self, key: str) -> Value | None:
        """Return the value of a key; None if the key does not exist. Raises: EtcdAwayError if etcd
        is unreachable."""
        values, _ = await self.etcd.get(key)
        return values.get(key)

    async def _keep_lease(self) -> None:
        """Renew the lease, until cancelled. If it has expired, request another one. Raises:
        EtcdAwayError, after which `_persist` calls this again."""
        while True:
            began = time.monotonic()
            if self.lease and await self.etcd.keep(self.lease):
                self._renewed_at = began
            else:
                self.lease = 0
                if not await self._register():
                    LOG.warning(
                        "mirror: another node is also named %s; give this node a different `advertise` or `port`",
                        self._own,
                    )
            is_well = self.lease and self.etcd.away_since is None
            await asyncio.sleep(self._seconds / _NUM_RENEWALS if is_well else _RETRY_SECONDS)

    async def _propose_views(self) -> None:
        """Propose views while this node is a proposer, until cancelled. Raises: see
        `_keep_lease`."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._is_proposer():
                await self._propose_in_turn()

    async def _propose_in_turn(self) -> None:
        """Propose views while this node is a proposer."""
        nodes = Followed(self.etcd, self._nodes_prefix)
        following = asyncio.ensure_future(nodes.run())
        differs_since = math.inf
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                if not self._is_proposer():
                    return
                if following.done():
                    following.result()
                is_known = nodes.revision and self.shared.revision
                proposed = self._propose(nodes) if is_known else None
                now = time.monotonic()
                if proposed is None:
                    differs_since = math.inf
                    continue
                differs_since = min(differs_since, now)
                if self._latest is None or now >= differs_since + _DIFFERING_SECONDS:
                    differs_since = math.inf
                    await self._put(proposed)
        finally:
            following.cancel()

    def _is_proposer(self) -> bool:
        """Return whether this node should propose views: it is among the first responding nodes of
        the view, or not in the view."""
        names = () if self._latest is None else self._latest.names
        away = self.find_away()
        there = [name for name in names if name not in away or name == self._own]
        return self._own not in there[_NUM_PROPOSERS:]

    def _propose(self, nodes: Followed) -> View | None:
        """Return the view that should replace the view in etcd; None if that is up to date."""
        current = self._read_view(self.shared.values.get(self._view_key))
        live = [key.removeprefix(self._nodes_prefix) for key in nodes.values]
        # Just after etcd was away, nodes may have had no time to renew their leases
        keeps = time.monotonic() < max(self._started_at, self.etcd.away_at) + self._seconds
        self._joined = live
        return propose(current, self._latest, live, expected=self.size, keeps=keeps)

    async def _put(self, view: View) -> None:
        """Write a view to etcd, unless another node has written one since this node read it."""
        current = self.shared.values.get(self._view_key)
        expected = {self._view_key: 0 if current is None else current.revision}
        await self.etcd.change(expected, {self._view_key: pack_json(_as_json(view))})

    def _read_view(self, value: Value | None) -> View | None:
        """Parse the value of the view's key. Returns: None if there is no value. Raises:
        ConfigError if it is not a view."""
        if value is None:
            return None
        view = _make_view(_parse(value))
        if view is None:
            raise ConfigError(
                f"etcd: found {value.data[:80]!r} at {self._view_key!r}, which is not a view\n"
                "delete that key, so that the nodes agree on a new view, or set another `mirror.etcd.prefix`"
            )
        return view

    def _load(self) -> View | None:
        """Return the view in this node's folder; None if the folder has no view of this cluster."""
        try:
            stored = parse_json(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        is_ours = isinstance(stored, dict) and stored.get("root") == self._root
        return _make_view(stored) if is_ours else None

    def _store(self, view: View) -> None:
        try:
            keep_computed(self._path, pack_json({"root": self._root, **_as_json(view)}))
        except CacheError as error:
            LOG.warning("mirror: %s", error)


async def _persist(work: Callable[[], Awaitable[None]]) -> None:
    """Call `work` repeatedly until cancelled, even if etcd refuses a request, since the cause may
    be fixed."""
    while True:
        try:
            await work()
        except EtcdAwayError:
            pass
        except ConfigError as error:
            LOG.warning("mirror: %s", error)
            await asyncio.sleep(10 * _RETRY_SECONDS)
        await asyncio.sleep(_RETRY_SECONDS)


def _parse(value: Value) -> dict[str, Any]:
    """Return the JSON object in a value; an empty dict if the value is not a JSON object."""
    try:
        fields = parse_json(value.data)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _as_json(view: View) -> dict[str, Any]:
    return {"number": view.number, "nodes": view.names, "earlier": view.earlier}


def _make_view(fields: dict[str, Any]) -> View | None:
    """Make a view from the result of `_as_json`. Returns: None if the fields are not valid."""
    if not fits(fields, _VIEW):
        return None
    return View(fields["number"], tuple(fields["nodes"]), tuple(map(tuple, fields["earlier"])))
