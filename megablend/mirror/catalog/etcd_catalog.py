"""The catalog of a cluster, which is stored in etcd. Each node has a copy, so reading it does not
require etcd.

Below the prefix:
    shared/revisions/<dataset>@<digest>     a revision
    shared/wants/<dataset>@<revision>       a want
    shared/catalog                          the marker: [random name of the catalog, number of its
                                            changes]
    held/<node>                             see `reports`

Each node usually updates its copy from etcd. But if the copy's catalog has another name or more
changes than the catalog in etcd, etcd has lost its data, or an older state of etcd was restored.
The first node that notices this chooses a new random name. Each node puts back the entries that its
copy has and etcd lacks, before it updates its copy. The first node also puts back entries that are
older in etcd. So no entry is deleted because etcd has lost it. However, an entry may come back if
it was removed while a node was unreachable, or after the time of the backup that was restored. A
node changes the catalog only if its copy is up to date.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from megablend.errors import ConfigError, DataError, MegablendError, ResourceError
from megablend.mirror.catalog.catalog import Catalog, Revision, Want, pack_entry, unpack_entry
from megablend.mirror.catalog.holding import Holding
from megablend.mirror.catalog.listings import Listings
from megablend.mirror.catalog.manifest import Manifest
from megablend.mirror.catalog.reports import NodeReports
from megablend.mirror.members.etcd import EtcdAwayError, Value
from megablend.mirror.node.engine import AwayError
from megablend.mirror.node.frames import pack_json
from megablend.system.limited_json import parse_json
from megablend.system.limited_log import LimitedLog
from megablend.system.log import LOG

if TYPE_CHECKING:
    from megablend.mirror.members.etcd_members import EtcdMembers
    from megablend.mirror.peers.cluster import Cluster

MANIFEST_PATH = "/v1/manifest"
FORGOTTEN_PATH = "/v1/forgotten"
_MAX_CHANGES = 100
"""The maximum number of changes in a transaction; etcd allows 128 operations."""
_PART_BYTES = 8 << 20
"""The maximum number of bytes of a manifest in one response."""
_NUM_RANDOM = 3
"""The number of random nodes that are asked for a manifest, before the node that made it."""
_HEARD_SECONDS = 20.0
_LOOK_SECONDS = 1.0
_PERIOD_SECONDS = 10.0
Entry = Revision | Want


class _Marker(NamedTuple):
    """The value of the key `shared/catalog`. The name is empty if there is no catalog yet."""

    name: str = ""
    number: int = 0
    """The number of changes that the catalog has had."""
    revision: int = 0
    """The revision of etcd in which the marker was last written."""

    @classmethod
    def read(cls, value: Value | None) -> _Marker:
        """Parse a value of `shared/catalog`. Raises: ConfigError if it is not a marker."""
        if value is None:
            return cls()
        try:
            name, number = parse_json(value.data)
            return cls(str(name), int(number), value.revision)
        except (ValueError, TypeError):
            raise _not_ours("shared/catalog", value) from None


class EtcdCatalog:
    """The catalog in etcd, for use by one of the nodes. It keeps the node's copy up to date, and
    makes changes in etcd.

    Args:
        cluster: the cluster.
        keys: the cluster's keys in etcd.
        catalog: this node's copy of the catalog.
        call: runs a function in the store's thread.
        holding: makes a new plan after changes.
        forget: deletes revisions, and files that belong to no other revision, in the store's
            thread.
        listings: knows the results of this node's listings, for the node's reports.
    """

    def __init__(
        self,
        cluster: Cluster,
        keys: EtcdMembers,
        catalog: Catalog,
        call: Callable[..., Awaitable[Any]],
        holding: Holding,
        forget: Callable[[Sequence[Revision]], dict[str, Any]],
        listings: Listings,
    ) -> None:
        self._cluster = cluster
        self._keys = keys
        self._catalog = catalog
        self._call = call
        self._holding = holding
        self._forget = forget
        self._prefix = f"{keys.prefix}shared/"
        self._marker_key = f"{self._prefix}catalog"
        self.revision = 0
        """The revision of etcd with which the copy agrees; 0 if it has not agreed so far."""
        self._num_syncs = 0
        self._last_marker = _Marker()
        """The marker in etcd when the copy last agreed with etcd."""
        self.trouble = ""
        """Why the copy does not agree with etcd; "" if no reason is known."""
        self._news = asyncio.Condition()
        self._lacks_manifests = asyncio.Event()
        self._log = LimitedLog()
        self.reports = NodeReports(cluster, keys, catalog, holding, listings, lambda: self.revision)
        self._forgotten: dict[str, dict[str, Any]] = {}
        """For each dataset, the numbers of files and bytes that this node deleted when revisions
        were last removed."""

    async def run(self) -> None:
        """Keep the copy in agreement with etcd, and write reports, until cancelled."""
        await asyncio.gather(self._follow(), self._fetch_manifests(), self.reports.run())

    async def change(
        self,
        puts: Iterable[Entry] = (),
        deletes: Iterable[Entry] = (),
        is_due: Callable[[], bool] = lambda: True,
    ) -> None:
        """Change the catalog in etcd, and wait until this node's copy has the changes. Nothing is
        changed if `is_due` returns False. Raises: EtcdAwayError; ResourceError if the changes do
        not arrive in time."""
        changes = [
            *[(self._key_of(entry), pack_entry(entry)) for entry in puts],
            *[(self._key_of(entry), None) for entry in deletes],
        ]
        await self._wait_for(partial(self._has_synced, 1))
        for begin in range(0, len(changes), _MAX_CHANGES):
            next_sync = self._num_syncs + 1
            while is_due():
                revision = await self._write(changes[begin : begin + _MAX_CHANGES])
                if revision is not None:
                    await self._wait_for(partial(self._has_reached, revision))
                    break
                # Another node has changed the catalog: try again when the copy has that change
                await self._wait_for(partial(self._has_synced, next_sync))
                next_sync = self._num_syncs + 1

    async def catch_up(self) -> None:
        """Wait until the copy has all changes that were made so far, if etcd can be reached."""
        with contextlib.suppress(MegablendError):
            values, _ = await self._keys.etcd.get(self._marker_key)
            marker = values.get(self._marker_key)
            if marker is not None:
                await self._wait_for(partial(self._has_reached, marker.revision))

    def _has_synced(self, times: int) -> bool:
        return self._num_syncs >= times

    def _has_reached(self, revision: int) -> bool:
        """Return whether the copy has all changes up to the given revision of etcd."""
        return self.revision >= revision

    async def _write(self, changes: Sequence[tuple[str, bytes | None]]) -> int | None:
        """Write the values of keys, unless the catalog has changed since it was last copied. A key
        whose value is None is deleted. Returns: see `Etcd.change`."""
        last = self._last_marker
        puts = {key: data for key, data in changes if data is not None}
        puts[self._marker_key] = pack_json([last.name, last.number + 1])
        deletes = [key for key, data in changes if data is None]
        return await self._keys.etcd.change({self._marker_key: last.revision}, puts, deletes)

    async def _wait_for(self, is_met: Callable[[], bool]) -> None:
        """Wait for news from etcd until `is_met` returns True. Raises: the errors of `change`;
        ConfigError."""
        if is_met():
            return
        if self._keys.etcd.away_since is not None:
            raise EtcdAwayError(
                f"etcd is unreachable: {self._keys.etcd.trouble}\nstart it, and try again"
            )
        if self.trouble:
            raise ConfigError(self.trouble)
        async with self._news:
            try:
                await asyncio.wait_for(self._news.wait_for(is_met), _HEARD_SECONDS)
            except asyncio.TimeoutError:
                raise ResourceError(
                    self.trouble
                    or f"node {self._cluster.own} received nothing from etcd for {_HEARD_SECONDS:g} s, so the change may "
                    "or may not have been made\n"
                    "check with `megablend datasets list`, and try again"
                ) from None

    def _key_of(self, entry: Entry) -> str:
        kind = "revisions" if isinstance(entry, Revision) else "wants"
        return f"{self._prefix}{kind}/{entry.name}"

    async def _follow(self) -> None:
        """Make the copy agree with etcd after each change, until cancelled."""
        shared = self._keys.shared
        while True:
            values = shared.values
            try:
                if shared.revision:
                    await self._sync(values, shared.revision)
                self.trouble = ""
            except EtcdAwayError:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            except DataError as error:
                # The disk may be mended, or have room again
                self._log.warn(self._cluster.own, str(error))
                self.trouble = str(error)
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            except ConfigError as error:
                LOG.warning("mirror: %s", error)
                self.trouble = str(error)
            await shared.wait_for_change(values)

    async def _sync(self, values: Mapping[str, Value], revision: int) -> None:
        """Make the copy agree with etcd, after putting back the entries that etcd has lost.

        Args:
            values: the values of the keys below `shared/`.
            revision: the revision of etcd to which these values belong.
        """
        entries = self._read_entries(values)
        marker = _Marker.read(values.get(self._marker_key))
        name, number = await self._call(self._catalog.get_seen)
        is_same = marker.name == name
        is_older = is_same and number > marker.number
        if (is_older or not is_same or not marker.name) and await self._put_back(
            values, entries, marker, is_older=is_older
        ):
            return  # `_follow` gets the new values
        await self._apply(entries)
        await self._call(self._catalog.set_seen, marker.name, marker.number)
        self._last_marker = marker
        async with self._news:
            self.revision = revision
            self._num_syncs += 1
            self._news.notify_all()
        self._holding.change()
        self._lacks_manifests.set()
        # Each node removes the past wants that were requested on it
        past = [entry for entry in entries.values() if isinstance(entry, Want) and entry.is_past]
        own_past = [entry for entry in past if entry.by == self._cluster.own]
        if own_past:
            await self._write([(self._key_of(entry), None) for entry in own_past])

    def _read_entries(self, values: Mapping[str, Value]) -> dict[str, Entry]:
        """Parse the revisions and wants in etcd. Returns: the entries by key. Raises: ConfigError
        if the keys contain data of other programs."""
        entries: dict[str, Entry] = {}
        for key, value in values.items():
            kind, _, name = key.removeprefix(self._prefix).partition("/")
            try:
                if kind == "revisions":
                    entries[key] = unpack_entry(Revision, value.data)
                elif kind == "wants":
                    entries[key] = unpack_entry(Want, value.data)
                else:
                    continue
                is_valid = entries[key].name == name
            except (ValueError, TypeError):
                is_valid = False
            if not is_valid:
                raise _not_ours(key, value)
        return entries

    async def _put_back(
        self,
        values: Mapping[str, Value],
        entries: Mapping[str, Entry],
        marker: _Marker,
        *,
        is_older: bool,
    ) -> bool:
        """Put back the entries that the copy has and etcd lacks. If `is_older` is set, the catalog
        in etcd is older than the copy, so entries that differ are also put back. The first node
        that notices the loss also chooses a new name for the catalog. Returns: whether etcd was
        changed, by this node or another one."""
        own: list[Entry] = [*self._catalog.revisions.values(), *self._catalog.wants.values()]
        lost = {
            key: pack_entry(entry)
            for key, entry in {self._key_of(entry): entry for entry in own}.items()
            if key not in entries or (is_older and entries[key] != entry)
        }
        puts = dict(lost)
        name = marker.name
        if is_older or not name:
            name = os.urandom(8).hex()
            puts[self._marker_key] = pack_json([name, 0])
        keys = list(puts)
        for begin in range(0, len(keys), _MAX_CHANGES):
            some = {key: puts[key] for key in keys[begin : begin + _MAX_CHANGES]}
            # Do not overwrite what another node has put back first
            revisions_of_keys = {
                key: values[key].revision for key in (*some, self._marker_key) if key in values
            }
            expected = dict.fromkeys((*some, self._marker_key), 0) | revisions_of_keys
            if await self._keys.etcd.change(expected, some) is None:
                return True
        if lost:
            LOG.warning("mirror: restored %d revisions and wants that etcd had lost", len(lost))
        await self._call(self._catalog.set_seen, name, 0)
        return bool(puts)

    async def _apply(self, entries: Mapping[str, Entry]) -> None:
        """Replace all entries of the copy by the given entries, without wants that have expired."""
        catalog = self._catalog
        for entry in entries.values():
            if isinstance(entry, Revision):
                if catalog.revisions.get(entry.name) != entry:
                    await self._call(catalog.put_revision, entry)
            elif not entry.is_past and catalog.wants.get(entry.name) != entry:
                await self._call(catalog.put_want, entry)
        for want in catalog.wants.values():
            if self._key_of(want) not in entries:
                await self._call(catalog.remove_want, want)
        removed: dict[str, list[Revision]] = {}
        for revision in catalog.revisions.values():
            if self._key_of(revision) not in entries:
                removed.setdefault(revision.dataset, []).append(revision)
        for dataset, revisions in removed.items():
            self._forgotten[dataset] = await self._call(self._forget, revisions)

    async def answer(self, path: str, body: bytes) -> bytes:
        """Respond to a request from another node, and return the body of the response."""
        handlers = {MANIFEST_PATH: self._send_manifest, FORGOTTEN_PATH: self._send_forgotten}
        return await handlers[path](body)

    async def _send_manifest(self, body: bytes) -> bytes:
        """Return the requested part of a stored manifest; b"" beyond its end, or if this node does
        not have the manifest."""
        request = parse_json(body)
        digest = str(request["digest"])
        if all(revision.digest != digest for revision in self._catalog.revisions.values()):
            return b""
        begin = int(request["begin"])
        data: bytes = await self._call(self._catalog.read_manifest, digest)
        return data[begin : begin + _PART_BYTES]

    async def _fetch_manifests(self) -> None:
        """Fetch the manifests that are missing on this node, until cancelled."""
        while True:
            self._lacks_manifests.clear()
            lacking = await self._call(self._catalog.list_lacking)
            for revision in lacking:
                await self._fetch_manifest(revision)
            if lacking and await self._call(self._catalog.list_lacking):
                await asyncio.sleep(random.uniform(0, 2 * _LOOK_SECONDS))
            else:
                # Look again after a while, since a damaged manifest is deleted when it is read
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._lacks_manifests.wait(), _PERIOD_SECONDS)

    async def _fetch_manifest(self, revision: Revision) -> None:
        """Fetch a manifest from one of the other nodes, if any of them has it."""
        others = [name for name in self._cluster.names if name != self._cluster.own]
        # In random order, so that not all nodes ask the same node
        random.shuffle(others)
        for node in [*others[:_NUM_RANDOM], revision.by, *others[_NUM_RANDOM:]]:
            if node not in others or node in self._cluster.find_away():
                continue
            try:
                data = await self._request_manifest(node, revision.digest)
                if data:
                    # Raises ValueError if the manifest is damaged
                    await asyncio.to_thread(Manifest.unpack, revision.digest, data)
                    await self._call(self._catalog.put_manifest, revision.digest, data)
                    self._holding.change()
                    return
            except (AwayError, MegablendError, ValueError) as error:
                self._log.warn(node, f"cannot get the manifest of {revision}: {error}")

    async def _request_manifest(self, node: str, digest: str) -> bytes:
        """Request a manifest from another node, part by part. Returns: the manifest; b"" if the
        node does not have it."""
        data = b""
        while True:
            request = pack_json({"digest": digest, "begin": len(data)})
            part = await self._cluster.post(node, MANIFEST_PATH, request)
            data += part
            if len(part) < _PART_BYTES:
                return data

    async def _send_forgotten(self, body: bytes) -> bytes:
        """Wait until the copy has reached the requested revision of etcd. Then return the numbers
        of files and bytes that this node deleted when revisions of the requested datasets were last
        removed."""
        request = parse_json(body)
        await self._wait_for(partial(self._has_reached, int(request["revision"])))
        return pack_json(self._sum_forgotten(request["datasets"]))

    def _sum_forgotten(self, datasets: Iterable[str]) -> dict[str, int]:
        deleted = [self._forgotten[dataset] for dataset in datasets if dataset in self._forgotten]
        return {name: sum(counts[name] for counts in deleted) for name in ("files", "bytes")}

    async def forget(self, revisions: Sequence[Revision], wants: Sequence[Want]) -> dict[str, Any]:
        """Delete revisions and wants on all nodes. Returns: a JSON object with the revisions, the
        numbers of files and bytes that each node deleted, and the nodes that did not respond and
        will delete files later."""
        await self.change(deletes=[*wants, *revisions])
        datasets = sorted({revision.dataset for revision in revisions})
        request = pack_json({"datasets": datasets, "revision": self.revision})
        nodes: dict[str, Any] = {self._cluster.own: self._sum_forgotten(datasets)}
        away = list[str]()

        async def ask(node: str) -> None:
            try:
                nodes[node] = parse_json(await self._cluster.post(node, FORGOTTEN_PATH, request))
            except (AwayError, MegablendError):
                away.append(node)

        others = [name for name in self._cluster.names if name != self._cluster.own]
        await asyncio.gather(*map(ask, others))
        return {
            "revisions": [str(revision) for revision in revisions],
            **{name: sum(counts[name] for counts in nodes.values()) for name in ("files", "bytes")},
            "nodes": nodes,
            "away": sorted(away),
        }


def _not_ours(key: str, value: Value) -> ConfigError:
    return ConfigError(
        f"etcd: {key}: found {value.data[:60]!r}, expected the JSON of a megablend catalog\nset `mirror.etcd.prefix` "
        "to a prefix that nothing else uses"
    )
