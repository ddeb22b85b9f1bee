"""Lists the sources of datasets: when a dataset is added, and again as long as it is wanted.

If the source has new or replaced files, they make a new revision, the dataset's latest. If files are
gone, or the source cannot be listed, the catalog stays as it is, and `status` tells why. In a cluster
with etcd one node lists a dataset: its home among those nodes of the view that are to hold it, as
long as that node has its lease.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from megablend.errors import MegablendError
from megablend.mirror.catalog.catalog import EVERY, Catalog, Listed, Revision
from megablend.mirror.catalog.manifest import DataFile, Manifest
from megablend.mirror.catalog.source_files import check_name, list_files
from megablend.mirror.members.homes import Homes
from megablend.mirror.node.engine import Engine
from megablend.mirror.node.source_reads import SourceReader
from megablend.storage.base import Storage
from megablend.storage.location import escape_wildcards
from megablend.storage.objects.urls import is_web, split_query
from megablend.system.log import LOG

if TYPE_CHECKING:
    from megablend.mirror.catalog.mates import Mates

_MOST_LETTERS = 10_000
"""Letters of a revision's sources that are stored: a revision is one value in etcd."""
_TROUBLE_LETTERS = 500
_LOOK_SECONDS = 1.0
_NUM_AT_A_TIME = 4
Put = Callable[[Revision, Revision | None], Awaitable[None]]
"""Puts a revision into the catalog. With a second revision, does so only if that is still the
dataset's latest."""


class _Listed(NamedTuple):
    """What a source was found to have."""

    manifest: Manifest
    digest: str
    packed: bytes

    def describe(self) -> dict[str, Any]:
        """The fields of a revision that tell of its files."""
        return {
            "digest": self.digest,
            "num_files": len(self.manifest),
            "num_bytes": int(self.manifest.sizes.sum()),
            "added": time.time(),
        }


class Listings:
    """Lists the sources of datasets.

    Args:
        pages: the engine in whose store's thread the catalog is changed.
        source: reads the sources.
        catalog: the datasets.
        put: puts a revision whose manifest is in the catalog already.
        is_held: returns whether a dataset's latest revision is held by those who want it, as far as
            that is possible.
        mates: the nodes of a cluster with etcd; None without one.
    """

    def __init__(
        self,
        pages: Engine,
        source: SourceReader,
        catalog: Catalog,
        put: Put,
        is_held: Callable[[Revision], Awaitable[bool]],
        mates: Mates | None,
    ) -> None:
        self._pages = pages
        self._source = source
        self._catalog = catalog
        self._put = put
        self._is_held = is_held
        self._mates = mates
        self._own: tuple[list[object], list[Revision]] = ([None] * 3, [])
        self._running: dict[str, asyncio.Task[None]] = {}
        self.counts = Counter[str]()
        """The number of listings by how they ended: new, same, waiting, failed."""

    async def add(
        self, dataset: str, sources: Sequence[str], said: Sequence[str], every: float | None
    ) -> Revision:
        """List sources as the latest revision of a dataset. Raises: as `list_files` does.

        Args:
            said: how the user named the sources, which the revision records: the name of a text
                file instead of the million URLs in it.
            every: seconds until the source is listed again; None to keep what was said before.
        """
        check_name(dataset)
        found = await self._source.ask(lambda storage: self._list(storage, sources))
        # Queries of URLs may be signatures: they are kept in memory only
        self._source.add_queries({url: query for url, query in map(split_query, sources) if query})
        plain = [split_query(each)[0] for each in sources]
        told = [split_query(each)[0] for each in said or sources]
        # A shell may name 100,000 files
        told = told[: sum(letters <= _MOST_LETTERS for letters in accumulate(map(len, told)))]
        earlier = self._catalog.list_revisions(dataset)[-1:]
        usual = earlier[0].every if earlier else EVERY
        revision = await self._keep(
            Revision(
                dataset=dataset,
                **found.describe(),
                sources=tuple(told),
                by=self._catalog.own,
                every=usual if every is None else every,
                is_plain=told == plain,
            ),
            found,
        )
        await self._put(revision, None)
        await self._note(dataset, "")
        return revision

    def _list(
        self,
        storage: Storage,
        sources: Sequence[str],
        paths: Mapping[str, str] = MappingProxyType({}),
    ) -> _Listed:
        manifest = list_files(storage, sources, self._source.check_allowed, paths)
        return _Listed(manifest, manifest.revision, manifest.pack())

    async def _keep(self, revision: Revision, found: _Listed) -> Revision:
        """Store the manifest of a revision. Returns: the revision, dated."""
        revision = self._catalog.date(revision)
        await self._pages.call(self._catalog.put_manifest, revision.digest, found.packed)
        return revision

    async def run(self) -> None:
        """List sources again when it is time, until cancelled."""
        try:
            while True:
                now = time.time()
                for latest in self._find_own():
                    dataset = latest.dataset
                    listed = self._catalog.listed.get(dataset)
                    if listed is None:
                        # Another node may have listed it just now
                        await self._note(dataset, "")
                    elif (
                        not 0 <= now - listed.at < latest.every
                        and dataset not in self._running
                        and len(self._running) < _NUM_AT_A_TIME
                    ):
                        self._running[dataset] = asyncio.ensure_future(self._list_again(latest))
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            for each in self._running.values():
                each.cancel()

    def _find_own(self) -> list[Revision]:
        """Find the latest revisions of the datasets whose sources this node lists."""
        names: Sequence[str] = ()
        if self._mates is not None:
            names = self._mates.nodes.names
            is_heard = self._mates.keys.lease and self._mates.keys.etcd.away_since is None
            if not is_heard or self._catalog.own not in names:
                return []
        catalog = self._catalog
        about: list[object] = [catalog.revisions, catalog.wants, names]
        # Each of them is replaced when it changes, so nothing has changed if they are the same
        if all(one is other for one, other in zip(self._own[0], about, strict=True)):
            return self._own[1]
        wanted: dict[str, set[str]] = {}
        for want in catalog.wants.values():
            among = {*want.nodes} & {*names} if want.nodes else {*names}
            wanted.setdefault(want.dataset, set()).update(among)
        latest: dict[str, Revision] = {}
        # The last one is the latest, as in `list_revisions`
        for each in sorted(catalog.revisions.values(), key=lambda each: (each.added, each.digest)):
            latest[each.dataset] = each
        own = [each for name, each in latest.items() if each.every and name in wanted]
        if self._mates is not None:
            find_homes = lru_cache(None)(Homes)

            def is_home(dataset: str) -> bool:
                homes = find_homes(tuple(sorted(wanted[dataset]))) if wanted[dataset] else None
                digest = hashlib.blake2b(dataset.encode("utf-8", "surrogateescape")).hexdigest()
                return homes is not None and homes.order_names(digest, 0, 1) == [catalog.own]

            own = [each for each in own if is_home(each.dataset)]
        self._own = (about, own)
        return own

    async def _list_again(self, latest: Revision) -> None:
        try:
            try:
                trouble = await self._look(latest)
            except MegablendError as error:
                trouble = self._fail(latest, str(error))
            except Exception as error:
                LOG.warning("mirror: this is a bug in megablend", exc_info=True)
                trouble = self._fail(latest, repr(error))
            await self._note(latest.dataset, trouble)
        finally:
            del self._running[latest.dataset]

    def _fail(self, latest: Revision, trouble: str) -> str:
        """Count a listing that changed nothing, and log it if it is news. Returns: why."""
        self.counts["failed"] += 1
        if trouble[:_TROUBLE_LETTERS] != self._catalog.listed[latest.dataset].trouble:
            LOG.warning("mirror: the source of %s: %s", latest.dataset, trouble)
        return trouble

    async def _look(self, latest: Revision) -> str:
        """List the source of a dataset again. Returns: what is wrong with it; empty if it is
        unchanged, or has made a new revision. Raises: as `add` does."""

        def look(storage: Storage) -> tuple[_Listed, list[DataFile]]:
            if latest.is_plain:
                found = self._list(storage, latest.sources)
            else:
                # Their paths follow from patterns that are not remembered
                known = self._catalog.read_files(latest.digest)
                known_paths = {file.key.location: file.path for file in known}
                found = self._list(storage, [*map(_escape, known_paths)], known_paths)
            if found.digest == latest.digest:
                return found, []
            known = self._catalog.read_files(latest.digest)
            return found, list(known.list_gone(found.manifest))

        if not await self._is_held(latest):
            # Otherwise a source that changes all the time would never be held
            self.counts["waiting"] += 1
            return self._catalog.listed[latest.dataset].trouble
        found, gone = await self._source.ask(look)
        if gone:
            return self._fail(
                latest,
                f"{len(gone):,} files are gone, such as {gone[0].key.location}: {latest} stays the latest revision\n"
                f"restore them, or `megablend datasets add {latest.dataset} SOURCE...` without them",
            )
        if found.digest == latest.digest:
            self.counts["same"] += 1
            return ""
        revision = replace(latest, by=self._catalog.own, is_found=True, **found.describe())
        await self._put(await self._keep(revision, found), latest)
        self.counts["new"] += 1
        LOG.info("mirror: the source of %s has changed: %s", latest, revision)
        return ""

    async def _note(self, dataset: str, trouble: str) -> None:
        listed = Listed(time.time(), trouble[:_TROUBLE_LETTERS])
        try:
            await self._pages.call(self._catalog.put_listed, dataset, listed)
        except MegablendError as error:
            LOG.warning("mirror: %s", error)

    def describe(self) -> dict[str, Any]:
        """By dataset that this node lists, when that was last done, and what was wrong."""
        listed = self._catalog.listed
        own = [each.dataset for each in self._find_own() if each.dataset in listed]
        return {name: {"by": self._catalog.own, **listed[name]._asdict()} for name in own}

    def count(self) -> dict[str, Any]:
        """The numbers of listings, for metrics."""
        failing = sum(bool(each["trouble"]) for each in self.describe().values())
        return {"failing": failing, "listings": dict(self.counts)}


def _escape(location: str) -> str:
    """The source that names only this file: a URL of a web server does so whatever characters it
    has."""
    return location if is_web(location) else escape_wildcards(location)
