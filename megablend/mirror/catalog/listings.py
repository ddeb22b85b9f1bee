"""Lists the sources of datasets: when a dataset is added, and then at intervals while it is wanted.

If a source has new or replaced files, the listing becomes the dataset's latest revision. If files
no longer exist, or the source cannot be listed, the catalog is not changed, and `status` reports
why. In a cluster with etcd, only one node lists each dataset. It is chosen by rendezvous hashing
among the nodes of the view that must hold the dataset, and needs a lease.
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
from typing import TYPE_CHECKING, Any

from megablend.errors import MegablendError
from megablend.mirror.catalog.catalog import EVERY, Catalog, Listed, Revision
from megablend.mirror.catalog.goal_state import shorten
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
    from megablend.mirror.peers.cluster import Cluster

_MAX_LETTERS = 10_000
"""The maximum total length of the sources in a revision, since a revision is one value in etcd."""
_TROUBLE_LETTERS = 500
_LOOK_SECONDS = 1.0
_NUM_AT_A_TIME = 4
Put = Callable[[Revision, Revision | None], Awaitable[None]]
"""A function that puts its first argument into the catalog. If the second argument is not None, the
first one is added only if the second one is still the dataset's latest revision."""


class Listings:
    """The part of a node that lists the sources of datasets, and adds revisions to the catalog.

    Args:
        engine: the engine. The catalog is changed in the thread of its store.
        source: reads the sources.
        catalog: contains the revisions and wants.
        put: adds a revision to the catalog. The revision's manifest is already stored there.
        is_held: returns whether a dataset's latest revision is held where it is wanted.
        cluster: the nodes of a cluster with etcd; None without one.
    """

    def __init__(
        self,
        engine: Engine,
        source: SourceReader,
        catalog: Catalog,
        put: Put,
        is_held: Callable[[Revision], Awaitable[bool]],
        cluster: Cluster | None,
    ) -> None:
        self._engine = engine
        self._source = source
        self._catalog = catalog
        self._put = put
        self._is_held = is_held
        self._cluster = cluster
        self._own: list[Revision] = []
        """The last result of `_find_own`."""
        self._own_inputs: list[object] = [None] * 3
        """The inputs of the last `_find_own`: revisions, wants and names of nodes."""
        self._running: dict[str, asyncio.Task[None]] = {}
        """The tasks of listings in progress, by dataset."""
        self.counts = Counter[str]()
        """The number of listings by result: "new", "same", "waiting" or "failed"."""

    async def add(
        self, dataset: str, sources: Sequence[str], said: Sequence[str], every: float | None
    ) -> Revision:
        """List sources as the latest revision of a dataset. Raises: see `list_files`.

        Args:
            said: the sources as the user named them, to be stored in the revision: for example, a
                text file instead of the million URLs in it.
            every: seconds until the source is listed again; None for the same interval as before.
        """
        check_name(dataset)
        manifest = await self._source.ask(lambda storage: self._list(storage, sources))
        # Queries of URLs may be signatures: they are kept in memory only
        self._source.add_queries({url: query for url, query in map(split_query, sources) if query})
        plain_sources = [split_query(source)[0] for source in sources]
        recorded = [split_query(source)[0] for source in said or sources]
        # A shell may name 100,000 files, of which only the first ones are recorded
        total_letters = accumulate(map(len, recorded))
        num_recorded = sum(letters <= _MAX_LETTERS for letters in total_letters)
        recorded = recorded[:num_recorded]
        if every is None:
            revisions = self._catalog.list_revisions(dataset)
            every = revisions[-1].every if revisions else EVERY
        revision = Revision(
            dataset=dataset,
            **await asyncio.to_thread(_describe, manifest),
            sources=tuple(recorded),
            by=self._catalog.own,
            every=every,
            is_plain=recorded == plain_sources,
        )
        revision = await self._store_manifest(revision, manifest)
        await self._put(revision, None)
        await self._put_listed(dataset, "")
        return revision

    def _list(
        self,
        storage: Storage,
        sources: Sequence[str],
        paths: Mapping[str, str] = MappingProxyType({}),
    ) -> Manifest:
        """List the files of sources: see `source_files.list_files`."""
        return list_files(storage, sources, self._source.check_allowed, paths)

    async def _store_manifest(self, revision: Revision, manifest: Manifest) -> Revision:
        """Store the manifest of a new revision. Returns: the revision, dated by `Catalog.date`."""
        packed = await asyncio.to_thread(manifest.pack)
        await self._engine.call(self._catalog.put_manifest, revision.digest, packed)
        return self._catalog.date(revision)

    async def run(self) -> None:
        """List each source again whenever its interval has passed, until cancelled."""
        try:
            while True:
                now = time.time()
                for latest in self._find_own():
                    dataset = latest.dataset
                    listed = self._catalog.listed.get(dataset)
                    if listed is None:
                        # Not listed at once, since another node may just have listed it
                        await self._put_listed(dataset, "")
                    elif (
                        not 0 <= now - listed.at < latest.every
                        and dataset not in self._running
                        and len(self._running) < _NUM_AT_A_TIME
                    ):
                        self._running[dataset] = asyncio.ensure_future(
                            self._list_again(latest, listed.trouble)
                        )
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            for task in self._running.values():
                task.cancel()

    def _find_own(self) -> list[Revision]:
        """Return the latest revision of each dataset whose source this node has to list."""
        names: Sequence[str] = ()
        if self._cluster is not None:
            names = self._cluster.names
            keys = self._cluster.views
            has_lease = keys is not None and keys.lease and keys.etcd.away_since is None
            if not has_lease or self._catalog.own not in names:
                return []
        catalog = self._catalog
        inputs: list[object] = [catalog.revisions, catalog.wants, names]
        # These objects are replaced at each change, so nothing has changed if they are the same
        if all(old is new for old, new in zip(self._own_inputs, inputs, strict=True)):
            return self._own
        nodes_of: dict[str, set[str]] = {}  # the nodes that must hold each wanted dataset
        for want in catalog.wants.values():
            nodes = {*want.nodes} & {*names} if want.nodes else {*names}
            nodes_of.setdefault(want.dataset, set()).update(nodes)
        latest: dict[str, Revision] = {}
        # The last one is the latest, as in `list_revisions`
        for revision in sorted(
            catalog.revisions.values(), key=lambda revision: (revision.added, revision.digest)
        ):
            latest[revision.dataset] = revision
        listed = [
            revision for name, revision in latest.items() if revision.every and name in nodes_of
        ]
        if self._cluster is not None:
            make_homes = lru_cache(None)(Homes)  # most datasets have the same nodes

            def is_home(dataset: str) -> bool:
                if not nodes_of[dataset]:
                    return False
                homes = make_homes(tuple(sorted(nodes_of[dataset])))
                digest = hashlib.blake2b(dataset.encode("utf-8", "surrogateescape")).hexdigest()
                return homes.order_names(digest, 0, 1) == [catalog.own]

            listed = [revision for revision in listed if is_home(revision.dataset)]
        self._own = listed
        self._own_inputs = inputs
        return listed

    async def _list_again(self, latest: Revision, before: str) -> None:
        """List the source of a dataset again, and record the result. The dataset may be removed in
        the meantime.

        Args:
            before: the problem of the previous listing; "" if there was none.
        """
        try:
            try:
                trouble = await self._check_source(latest, before)
            except MegablendError as error:
                trouble = self._fail(latest, str(error), before)
            except Exception as error:
                LOG.warning("mirror: this is a bug in megablend; please report it", exc_info=True)
                trouble = self._fail(latest, repr(error), before)
            await self._put_listed(latest.dataset, trouble)
        finally:
            del self._running[latest.dataset]

    def _fail(self, latest: Revision, trouble: str, before: str) -> str:
        """Count a failed listing, log its problem unless it is known, and return the problem."""
        self.counts["failed"] += 1
        if shorten(trouble, _TROUBLE_LETTERS) != before:
            LOG.warning("mirror: the source of %s: %s", latest.dataset, trouble)
        return trouble

    async def _check_source(self, latest: Revision, before: str) -> str:
        """List the source of a dataset again, and add a new revision if it has changed. Returns:
        the problem of the listing; "" if there is none. Raises: see `add`."""

        def compare(storage: Storage) -> tuple[Manifest, list[DataFile]]:
            """Return the files of the source, and the files of the revision that are gone."""
            if latest.is_plain:
                manifest = self._list(storage, latest.sources)
            else:
                # Paths cannot be computed, since the patterns that they follow from are not stored
                files = self._catalog.read_files((known or latest).digest)
                paths = {file.key.location: file.path for file in files}
                manifest = self._list(storage, [*map(_escape, paths)], paths)
            if known is None or manifest.revision == known.digest:
                return manifest, []
            files = self._catalog.read_files(known.digest)
            return manifest, list(files.list_gone(manifest))

        known = await self._find_known(latest)
        if known == latest and not await self._is_held(latest):
            # Otherwise a source that changes all the time would never be held
            self.counts["waiting"] += 1
            return before
        manifest, gone = await self._source.ask(compare)
        if gone:
            return self._fail(
                latest,
                f"{len(gone):,} files no longer exist, such as {gone[0].key.location}: {latest} stays the latest revision\n"
                f"restore them, or run `megablend datasets add {latest.dataset} SOURCE...` without them",
                before,
            )
        if known == latest and manifest.revision == latest.digest:
            self.counts["same"] += 1
            return ""
        facts = await asyncio.to_thread(_describe, manifest)
        revision = replace(latest, by=self._catalog.own, is_found=True, **facts)
        revision = await self._store_manifest(revision, manifest)
        await self._put(revision, latest)
        self.counts["new"] += 1
        LOG.info("mirror: the source of %s has changed: %s", latest, revision)
        return ""

    async def _find_known(self, latest: Revision) -> Revision | None:
        """Return the revision with which the source is compared, usually the latest one. If the
        latest one's manifest may be lost, together with the node that made it, return the last
        revision whose manifest is on this node; None if there is none."""
        cluster = self._cluster
        if cluster is None:
            return latest
        lacking = await self._engine.call(self._catalog.list_lacking)
        others = {*cluster.names} - {*cluster.find_away(), cluster.own}
        if latest not in lacking or latest.by in others:
            return latest
        revisions = self._catalog.list_revisions(latest.dataset)
        return next((revision for revision in reversed(revisions) if revision not in lacking), None)

    async def _put_listed(self, dataset: str, trouble: str) -> None:
        """Record that a dataset's source was listed just now."""
        listed = Listed(time.time(), shorten(trouble, _TROUBLE_LETTERS))
        try:
            await self._engine.call(self._catalog.put_listed, dataset, listed)
        except MegablendError as error:
            LOG.warning("mirror: %s", error)

    def describe(self) -> dict[str, Any]:
        """Return the time and the problem of this node's last listing of each dataset."""
        listed = self._catalog.listed
        own = [revision.dataset for revision in self._find_own() if revision.dataset in listed]
        return {name: {"by": self._catalog.own, **listed[name]._asdict()} for name in own}

    def count(self) -> dict[str, Any]:
        """Return the numbers of listings by result, and of datasets with problems, for metrics."""
        failing = sum(bool(listing["trouble"]) for listing in self.describe().values())
        return {"failing": failing, "listings": dict(self.counts)}


def _describe(manifest: Manifest) -> dict[str, Any]:
    """Return the fields of a `Revision` that describe its files."""
    return {
        "digest": manifest.revision,
        "num_files": len(manifest),
        "num_bytes": int(manifest.sizes.sum()),
        "added": time.time(),
    }


def _escape(location: str) -> str:
    """Return a pattern that matches only this file. URLs of web servers need no escapes, since they
    have no wildcards."""
    return location if is_web(location) else escape_wildcards(location)
