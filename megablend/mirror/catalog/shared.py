"""The catalog of a cluster, in etcd; each node has a copy, so that only changes need etcd.

Below the prefix:
    shared/revisions/<dataset>@<digest>     a revision
    shared/wants/<dataset>@<revision>       a want
    shared/catalog                          [a name, drawn when the first of these was put; how often
                                            they were changed]
    held/<node>                             see `told`

What etcd has is right, and a node does as it says, also when it was away: but not where its copy is
of a catalog of another name, or one that was changed more often, as when etcd has lost its data or
an old copy of them was restored. Then the first node that sees it draws a new name, and each one
puts back what its copy has and etcd lacks, before it does as etcd says. So nothing is deleted
because etcd has lost it; what was removed while a node was away may come back with that node.
Nothing is changed by a node that has not seen the last change.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from megablend.errors import ConfigError, MegablendError, ResourceError
from megablend.mirror.catalog.catalog import Catalog, Revision, Want, pack_entry, unpack_entry
from megablend.mirror.catalog.holding import Holding
from megablend.mirror.catalog.listings import Listings
from megablend.mirror.catalog.manifest import Manifest
from megablend.mirror.catalog.mates import Mates
from megablend.mirror.catalog.told import Told
from megablend.mirror.members.etcd import EtcdAwayError, Value
from megablend.mirror.node.engine import AwayError
from megablend.mirror.node.frames import pack_json
from megablend.system.limited_json import parse_json
from megablend.system.limited_log import LimitedLog
from megablend.system.log import LOG

MANIFEST_PATH = "/v1/manifest"
FORGOTTEN_PATH = "/v1/forgotten"
_MOST_CHANGES = 100
"""At a time: etcd takes 128."""
_PART_BYTES = 8 << 20
"""Of a manifest, in an answer."""
_NUM_RANDOM = 3
"""So many nodes are asked for a manifest before the one that has made it."""
_HEARD_SECONDS = 20.0
_LOOK_SECONDS = 1.0
_PERIOD_SECONDS = 10.0
Entry = Revision | Want


class _Marker(NamedTuple):
    """What is at `shared/catalog`."""

    name: str = ""
    number: int = 0
    revision: int = 0
    """Of etcd."""

    @classmethod
    def read(cls, value: Value | None) -> _Marker:
        """Raises: ConfigError if it is something else."""
        if value is None:
            return cls()
        try:
            name, number = parse_json(value.data)
            return cls(str(name), int(number), value.revision)
        except (ValueError, TypeError):
            raise _not_ours("shared/catalog", value) from None


class SharedCatalog:
    """Keeps a node's catalog as that of the cluster.

    Args:
        mates: the cluster.
        catalog: this node's copy.
        call: runs a function in the store's thread.
        holding: is told of changes, and tells what is held.
        forget: deletes what only some revisions had, and them. In the store's thread.
        listings: tell what they have listed.
    """

    def __init__(
        self,
        mates: Mates,
        catalog: Catalog,
        call: Callable[..., Awaitable[Any]],
        holding: Holding,
        forget: Callable[[Sequence[Revision]], dict[str, Any]],
        listings: Listings,
    ) -> None:
        self._nodes = mates.nodes
        self._keys = mates.keys
        self._catalog = catalog
        self._call = call
        self._holding = holding
        self._forget = forget
        self._shared = f"{mates.keys.prefix}shared/"
        self._marker = f"{self._shared}catalog"
        self.revision = 0
        """Of etcd, that the copy is as; 0: none since the start."""
        self._num_copies = 0
        self._last = _Marker()
        """As it was when the copy was as etcd."""
        self.trouble = ""
        """Why the copy is not as etcd is."""
        self._news = asyncio.Condition()
        self._lacks_manifests = asyncio.Event()
        self._log = LimitedLog()
        self.told = Told(mates, catalog, holding, listings, lambda: self.revision)
        self._forgotten: dict[str, dict[str, Any]] = {}
        """What was deleted with the revisions of a dataset that were forgotten last."""

    async def run(self) -> None:
        """Keep the copy, until cancelled."""
        tasks = [
            asyncio.ensure_future(each)
            for each in (self._follow(), self._fetch_manifests(), self.told.run())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in tasks:
                each.cancel()

    async def change(
        self,
        puts: Iterable[Entry] = (),
        deletes: Iterable[Entry] = (),
        is_due: Callable[[], bool] = lambda: True,
    ) -> None:
        """Change the catalog of all nodes, as long as that is due. It is done when this node has heard
        of it. Raises: EtcdAwayError; ResourceError if it has not heard of it."""
        changes = [
            *[(self._key_of(each), pack_entry(each)) for each in puts],
            *[(self._key_of(each), None) for each in deletes],
        ]
        await self._wait_for(partial(self._is_copied, 1))
        for begin in range(0, len(changes), _MOST_CHANGES):
            after = self._num_copies + 1
            while is_due():
                revision = await self._write(changes[begin : begin + _MOST_CHANGES])
                if revision is not None:
                    await self._wait_for(partial(self._is_as_of, revision))
                    break
                await self._wait_for(partial(self._is_copied, after))
                after = self._num_copies + 1

    async def catch_up(self) -> None:
        """Hear of what other nodes have changed before now, if etcd answers."""
        with contextlib.suppress(MegablendError):
            marker = (await self._keys.etcd.get(self._marker))[0].get(self._marker)
            if marker is not None:
                await self._wait_for(partial(self._is_as_of, marker.revision))

    def _is_copied(self, times: int) -> bool:
        return self._num_copies >= times

    def _is_as_of(self, revision: int) -> bool:
        """Whether the copy is as of a revision of etcd, or later."""
        return self.revision >= revision

    async def _write(self, changes: Sequence[tuple[str, bytes | None]]) -> int | None:
        """As `Etcd.change`, if nothing has changed since this copy."""
        puts = {key: data for key, data in changes if data is not None}
        return await self._keys.etcd.change(
            {self._marker: self._last.revision},
            puts | {self._marker: pack_json([self._last.name, self._last.number + 1])},
            [key for key, data in changes if data is None],
        )

    async def _wait_for(self, find: Callable[[], bool]) -> None:
        """Wait until something is so, of the copy. Raises: as `change`; ConfigError."""
        if find():
            return
        if self._keys.etcd.away_since is not None:
            raise EtcdAwayError(
                f"etcd is unreachable: {self._keys.etcd.trouble}\nstart it, and try again"
            )
        if self.trouble:
            raise ConfigError(self.trouble)
        async with self._news:
            try:
                await asyncio.wait_for(self._news.wait_for(find), _HEARD_SECONDS)
            except asyncio.TimeoutError:
                raise ResourceError(
                    f"{self._nodes.own} has heard nothing from etcd for {_HEARD_SECONDS:g} s, so it is not known "
                    "whether this was done\n"
                    "check `megablend datasets list`, and try again"
                ) from None

    def _key_of(self, entry: Entry) -> str:
        return (
            f"{self._shared}{'revisions' if isinstance(entry, Revision) else 'wants'}/{entry.name}"
        )

    async def _follow(self) -> None:
        shared = self._keys.shared
        while True:
            values = shared.values
            try:
                if shared.revision:
                    await self._take(values, shared.revision)
                self.trouble = ""
            except EtcdAwayError:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            except ConfigError as error:
                LOG.warning("mirror: %s", error)
                self.trouble = str(error)
            await shared.wait_for_change(values)

    async def _take(self, values: Mapping[str, Value], revision: int) -> None:
        """Make the copy as etcd is; first, put back what etcd has lost."""
        entries = self._read(values)
        marker = _Marker.read(values.get(self._marker))
        name, number = await self._call(self._catalog.get_seen)
        is_known = marker.name == name
        has_lost = not marker.name or (is_known and number > marker.number)
        if (has_lost or not is_known) and await self._put_back(values, marker, is_first=has_lost):
            return  # etcd has changed, of which this node will hear
        await self._copy(entries)
        await self._call(self._catalog.set_seen, marker.name, marker.number)
        self._last = marker
        async with self._news:
            self.revision = revision
            self._num_copies += 1
            self._news.notify_all()
        self._holding.change()
        self._lacks_manifests.set()
        past = [each for each in entries.values() if isinstance(each, Want) and each.is_past]
        if own := [(self._key_of(each), None) for each in past if each.by == self._nodes.own]:
            await self._write(own)

    def _read(self, values: Mapping[str, Value]) -> dict[str, Entry]:
        """Raises: ConfigError if other data are below the prefix."""
        entries: dict[str, Entry] = {}
        for key, value in values.items():
            kind, _, name = key.removeprefix(self._shared).partition("/")
            try:
                if kind == "revisions":
                    entries[key] = unpack_entry(Revision, value.data)
                elif kind == "wants":
                    entries[key] = unpack_entry(Want, value.data)
                else:
                    continue
                is_known = entries[key].name == name
            except (ValueError, TypeError):
                is_known = False
            if not is_known:
                raise _not_ours(key, value)
        return entries

    async def _put_back(
        self, values: Mapping[str, Value], marker: _Marker, *, is_first: bool
    ) -> bool:
        """Put what the copy has and etcd lacks. Returns: whether etcd has changed, by this or by
        something else."""
        own: list[Entry] = [*self._catalog.revisions.values(), *self._catalog.wants.values()]
        lost = {key: pack_entry(each) for each in own if (key := self._key_of(each)) not in values}
        keys = sorted(lost)
        for begin in range(0, len(keys), _MOST_CHANGES):
            some = {key: lost[key] for key in keys[begin : begin + _MOST_CHANGES]}
            if await self._keys.etcd.change(dict.fromkeys(some, 0), some) is None:
                return True
        if lost:
            LOG.warning("mirror: restored %d revisions and wants that etcd lacked", len(lost))
        name = marker.name
        if is_first:
            name = os.urandom(8).hex()
            new = {self._marker: pack_json([name, 0])}
            if await self._keys.etcd.change({self._marker: marker.revision}, new) is None:
                return True
        await self._call(self._catalog.set_seen, name, 0)
        return is_first or bool(lost)

    async def _copy(self, entries: Mapping[str, Entry]) -> None:
        known = self._catalog
        for entry in entries.values():
            if isinstance(entry, Revision) and known.revisions.get(entry.name) != entry:
                await self._call(known.put_revision, entry)
            if (
                isinstance(entry, Want)
                and not entry.is_past
                and known.wants.get(entry.name) != entry
            ):
                await self._call(known.put_want, entry)
        for want in known.wants.values():
            if self._key_of(want) not in entries:
                await self._call(known.remove_want, want)
        gone: dict[str, list[Revision]] = {}
        for revision in known.revisions.values():
            if self._key_of(revision) not in entries:
                gone.setdefault(revision.dataset, []).append(revision)
        for dataset, some in gone.items():
            self._forgotten[dataset] = await self._call(self._forget, some)

    async def answer(self, path: str, body: bytes) -> bytes:
        """Answer another node."""
        answers = {MANIFEST_PATH: self._give_manifest, FORGOTTEN_PATH: self._tell_forgotten}
        return await answers[path](body)

    async def _give_manifest(self, body: bytes) -> bytes:
        """A part of a manifest, as it is stored: empty if it is not here, or ends before."""
        about = parse_json(body)
        digest = str(about["digest"])
        if all(each.digest != digest for each in self._catalog.revisions.values()):
            return b""
        begin = int(about["begin"])
        data: bytes = await self._call(self._catalog.read_manifest, digest)
        return data[begin : begin + _PART_BYTES]

    async def _fetch_manifests(self) -> None:
        while True:
            self._lacks_manifests.clear()
            lacking = await self._call(self._catalog.list_lacking)
            for revision in lacking:
                await self._fetch_manifest(revision)
            if any(each.name in self._catalog.revisions for each in lacking) and (
                await self._call(self._catalog.list_lacking)
            ):
                await asyncio.sleep(random.uniform(0, 2 * _LOOK_SECONDS))
            else:
                # One that is damaged is dropped when it is read
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._lacks_manifests.wait(), _PERIOD_SECONDS)

    async def _fetch_manifest(self, revision: Revision) -> None:
        """Take a manifest from a node that has it, if there is one."""
        others = [each for each in self._nodes.names if each != self._nodes.own]
        random.shuffle(others)
        first = others[:_NUM_RANDOM]
        for node in [*first, revision.by, *others[_NUM_RANDOM:]]:
            if node not in others or node in self._nodes.find_away():
                continue
            try:
                data = b""
                while not data or len(data) % _PART_BYTES == 0:
                    about = {"digest": revision.digest, "begin": len(data)}
                    part = await self._nodes.post(node, MANIFEST_PATH, pack_json(about))
                    data += part
                    if not part:
                        break
                if data:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(None, Manifest.unpack, revision.digest, data)
                    await self._call(self._catalog.put_manifest, revision.digest, data)
                    self._holding.change()
                    return
            except (AwayError, MegablendError, ValueError) as error:
                self._log.warn(node, f"cannot get the manifest of {revision}: {error}")

    async def _tell_forgotten(self, body: bytes) -> bytes:
        """What this node has deleted with revisions of some datasets, when it has."""
        about = parse_json(body)
        await self._wait_for(partial(self._is_as_of, int(about["revision"])))
        return pack_json(self._sum_forgotten(about["datasets"]))

    def _sum_forgotten(self, datasets: Iterable[str]) -> dict[str, int]:
        known = [self._forgotten[each] for each in datasets if each in self._forgotten]
        return {name: sum(each[name] for each in known) for name in ("files", "bytes")}

    async def forget(self, revisions: Sequence[Revision], wants: Sequence[Want]) -> dict[str, Any]:
        """Forget revisions on all nodes. Returns: what was deleted here, and on each node that
        answers; and which do not, and will."""
        await self.change(deletes=[*wants, *revisions])
        datasets = sorted({each.dataset for each in revisions})
        about = pack_json({"datasets": datasets, "revision": self.revision})
        nodes: dict[str, Any] = {self._nodes.own: self._sum_forgotten(datasets)}
        away = list[str]()

        async def ask(node: str) -> None:
            try:
                nodes[node] = parse_json(await self._nodes.post(node, FORGOTTEN_PATH, about))
            except (AwayError, MegablendError):
                away.append(node)

        others = [each for each in self._nodes.names if each != self._nodes.own]
        await asyncio.gather(*map(ask, others))
        return {
            "revisions": [str(each) for each in revisions],
            **{name: sum(each[name] for each in nodes.values()) for name in ("files", "bytes")},
            "nodes": nodes,
            "away": sorted(away),
        }


def _not_ours(key: str, value: Value) -> ConfigError:
    return ConfigError(
        f"etcd: {key}: found {value.data[:60]!r}, expected the JSON of a megablend catalog\nset `mirror.etcd.prefix` "
        "to a prefix that nothing else uses"
    )
