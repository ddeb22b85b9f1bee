"""Carries out the subcommands of `megablend datasets` in the node process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megablend.errors import ConfigError, ResourceError
from megablend.mirror.catalog.catalog import LATEST, Catalog, Revision, Want
from megablend.mirror.catalog.goal_state import Patience, State
from megablend.mirror.catalog.holding import FILES_AT_A_TIME, Holding
from megablend.mirror.catalog.listings import Listings
from megablend.mirror.catalog.manifest import DataFile, Manifest
from megablend.mirror.catalog.share import Kept, make_share
from megablend.mirror.catalog.want_checks import check_size, choose_copies
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import count_bytes, count_pages, pages_of_file, split_portions
from megablend.mirror.disk.room import WANTED
from megablend.mirror.node.engine import Engine
from megablend.mirror.node.engine import Want as PageWant
from megablend.mirror.node.needs import Needs
from megablend.mirror.node.source_reads import SourceReader

if TYPE_CHECKING:
    from megablend.mirror.catalog.etcd_catalog import EtcdCatalog
    from megablend.mirror.peers.cluster import Cluster

_PLAN_SECONDS = 10.0
"""The maximum number of seconds to wait for a plan. There is no plan until the nodes have met."""


class Datasets:
    """The datasets of a mirror. Each subcommand of `megablend datasets` is carried out by a method,
    which returns a JSON object and raises ConfigError if the request is not valid.

    Args:
        engine: fetches the pages of datasets.
        source: reads the sources of datasets.
        catalog: contains the revisions of datasets and the wants.
        holding: holds wanted revisions.
        cluster: the nodes of a cluster with etcd, which share the catalog; None without etcd.
    """

    def __init__(
        self,
        engine: Engine,
        source: SourceReader,
        catalog: Catalog,
        holding: Holding,
        cluster: Cluster | None,
    ) -> None:
        self._engine = engine
        self._source = source
        self.catalog = catalog
        self.holding = holding
        self._cluster = cluster
        self.listings = Listings(engine, source, catalog, self._put_listed, self._is_held, cluster)
        self.shared: EtcdCatalog | None = None
        if cluster is not None and cluster.views is not None:
            # Imported here, since it needs aiohttp
            from megablend.mirror.catalog.etcd_catalog import EtcdCatalog

            self.shared = EtcdCatalog(
                cluster,
                cluster.views,
                catalog,
                engine.call,
                holding,
                self._forget,
                self.listings,
            )
        self._verbs: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "add": self.add,
            "want": self.want,
            "unwant": self.unwant,
            "pin": self.pin,
            "unpin": self.unpin,
            "list": self.list_all,
            "status": self.get_status,
            "wait": self.wait,
            "path": self.make_folder,
            "verify": self.verify,
            "gc": self.collect,
            "remove": self.remove,
        }

    @classmethod
    async def open(
        cls,
        engine: Engine,
        source: SourceReader,
        needs: Needs,
        cluster: Cluster | None = None,
    ) -> Datasets:
        """Open the datasets of a mirror. From then on the mirror keeps the pages of wanted
        revisions. Raises: DataError if the catalog cannot be read.

        Args:
            cluster: the nodes among which wanted revisions are divided; None if there are no other
                nodes.
        """
        sharing = None if cluster is None or cluster.views is None else cluster
        own = "" if sharing is None else sharing.own
        catalog = await engine.call(Catalog, engine.store.folder, own)
        holding = Holding(engine, needs, catalog, cluster)
        await engine.call(holding.keep_all)
        return cls(engine, source, catalog, holding, sharing)

    async def run(self) -> None:
        """Hold wanted revisions, and list their sources again, until cancelled."""
        parts = (self.holding, self.listings, self.shared)
        await asyncio.gather(*(part.run() for part in parts if part is not None))

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request, which contains a verb and its arguments, and return the result.
        Raises: the same errors as the method of the verb."""
        verb = self._verbs.get(request.pop("verb", ""))
        if verb is None or not _accepts(verb, request):
            raise ConfigError(
                "the node process does not know this command: it runs another version of megablend\n"
                "stop it with `megablend node stop`, and try again"
            )
        if self.shared is not None:
            # A command takes into account what earlier commands have changed on other nodes
            await self.shared.catch_up()
        if any(want.is_past for want in self.catalog.wants.values()):
            self.holding.change()
        return await verb(**request)

    async def add(
        self,
        dataset: str,
        sources: list[str],
        said: Sequence[str] = (),
        every: float | None = None,
    ) -> dict[str, Any]:
        """List sources as a dataset's latest revision: see `Listings.add`."""
        known = self.catalog.revisions
        revision = await self.listings.add(dataset, sources, said, every)
        return asdict(revision) | {"is_new": revision.name not in known}

    async def _put_listed(self, revision: Revision, earlier: Revision | None) -> None:
        """Put a revision into the catalog. If `earlier` is given, do so only if that is still the
        dataset's latest revision."""

        def is_due() -> bool:
            # The earlier revision may have been removed, or replaced, in the meantime
            revisions = self.catalog.list_revisions(revision.dataset)
            return earlier is None or revisions[-1:] == [earlier]

        await self._change([revision], is_due=is_due)

    async def _is_held(self, revision: Revision) -> bool:
        """Return whether a dataset's latest revision is held on all nodes where it is wanted. Data
        that cannot be held without user action are ignored. Returns False if etcd or too many nodes
        are unreachable."""
        with contextlib.suppress(asyncio.TimeoutError, ResourceError):
            await asyncio.wait_for(self.holding.wait_for(lambda: True), _PLAN_SECONDS)
            for state in self.holding.states:
                is_about = state.goal.revision == revision and state.goal.want.revision == LATEST
                has_ended = state.short or state.error is not None or state.is_stuck
                if is_about and state.missing and not has_ended:
                    return False
            return self.shared is None or await self.shared.reports.is_settled(revision.dataset)
        return False

    async def _change(
        self,
        puts: Sequence[Revision | Want] = (),
        deletes: Sequence[Want] = (),
        is_due: Callable[[], bool] = lambda: True,
    ) -> None:
        """Add and delete entries of the catalog, on all nodes that share it. Nothing is changed if
        `is_due` returns False."""
        if self.shared is not None:
            await self.shared.change(puts, deletes, is_due)
        elif is_due():
            for entry in puts:
                if isinstance(entry, Want):
                    await self._engine.call(self.catalog.put_want, entry)
                else:
                    await self._engine.call(self.catalog.put_revision, entry)
            for want in deletes:
                await self._engine.call(self.catalog.remove_want, want)
        self.holding.change()

    async def want(
        self,
        target: str,
        whole: bool = False,
        pin: bool = False,
        until: float | None = None,
        nodes: Sequence[str] = (),
        copies: int = 0,
    ) -> dict[str, Any]:
        """Record that a dataset is wanted. The arguments are described in `Want`."""
        dataset, revision = self.catalog.find(target)
        latest = self.catalog.find_dataset(dataset)[-1]
        if pin and revision is None:
            raise ConfigError(
                f"{target!r}: only a fixed revision can be pinned\n"
                f"pin the latest revision: {latest}"
            )
        name = LATEST if revision is None else revision.digest
        want = Want(
            dataset=dataset,
            revision=name,
            is_whole=whole,
            is_pinned=pin,
            until=until,
            since=time.time(),
            nodes=tuple(sorted(nodes)),
            copies=copies,
            by=self.catalog.own,
        )
        want = self.catalog.date_want(choose_copies(want, self._cluster))
        await check_size(want, revision or latest, self.holding)
        return await self._put_want(want)

    async def _put_want(self, want: Want) -> dict[str, Any]:
        await self._change([want])
        return {"want": want.target}

    async def unwant(self, target: str) -> dict[str, Any]:
        """Remove the want of a target from the catalog."""
        want = self._find_want(target)
        await self._change(deletes=[want])
        return {"want": want.target}

    async def pin(self, target: str) -> dict[str, Any]:
        """Pin a revision, so that it is never evicted. It becomes wanted if it is not yet."""
        _, revision = self.catalog.find(target)
        if revision is None or revision.name not in self.catalog.wants:
            return await self.want(target, pin=True)
        want = replace(self.catalog.wants[revision.name], is_pinned=True)
        await check_size(want, revision, self.holding)
        return await self._put_want(want)

    async def unpin(self, target: str) -> dict[str, Any]:
        """Unpin a revision. It remains wanted."""
        return await self._put_want(replace(self._find_want(target), is_pinned=False))

    def _find_want(self, target: str) -> Want:
        """Return the want of a target. Raises: ConfigError if the target is not wanted."""
        dataset, revision = self.catalog.find(target)
        name = f"{dataset}@{LATEST}" if revision is None else revision.name
        wants = {want.name: want for want in self.catalog.wants.values() if not want.is_past}
        if name in wants:
            return wants[name]
        others = [want.target for want in wants.values() if want.dataset == dataset]
        remedy = f"request it with `megablend datasets want {target}`"
        if others:
            remedy = f"name one of the wanted revisions of {dataset!r}: {', '.join(others)}"
        raise ConfigError(f"{target!r} is not wanted on this node\n{remedy}")

    async def list_all(self) -> dict[str, Any]:
        """Return all revisions and wants in the catalog."""
        revisions = self.catalog.revisions.values()
        ordered = sorted(revisions, key=lambda revision: (revision.dataset, revision.added))
        return {
            "revisions": [asdict(revision) for revision in ordered],
            "wants": [want.target for want in self.catalog.wants.values() if not want.is_past],
            "listed": await self._find_listed(),
        }

    async def _find_listed(self) -> dict[str, Any]:
        """Return the results of the last listings by all nodes: see `Listings.describe`."""
        reported: dict[str, Any] = {}
        if self.shared is not None:
            with contextlib.suppress(ResourceError):
                reported = await self.shared.reports.read_listed()
        return reported | self.listings.describe()

    async def get_status(self) -> dict[str, Any]:
        """Return how much of each wanted revision is held on this node, and on all nodes."""
        status: dict[str, Any] = {
            "capacity": await self._engine.call(self._engine.store.find_capacity),
            "trouble": self.holding.trouble,
            "goals": [
                state.as_json() for state in self.holding.states if not state.goal.want.is_past
            ],
            "listed": await self._find_listed(),
        }
        if self.shared is not None and self._cluster is not None:
            status["trouble"] = self.shared.trouble or status["trouble"]
            status["away"] = sorted(self._cluster.find_away())
            try:
                progress = await self.shared.reports.read_progress()
                status["wants"] = list(progress.values())
            except ResourceError as error:
                status["trouble"] = str(error)
        return status

    async def wait(self, target: str) -> dict[str, Any]:
        """Wait until all nodes hold their parts of a want. Raises: ResourceError if there is no
        room, or nothing can be fetched without user action; DataError if files no longer exist;
        ConfigError if the nodes cannot work together."""
        want = self._find_want(target)
        if self._cluster is not None:
            # While too few nodes are connected, the waits below continue
            with contextlib.suppress(ResourceError):
                await self._cluster.meet()
        status: dict[str, Any] = {"want": want.target}
        if not want.nodes or self.catalog.own in want.nodes:
            status = await self._wait_here(want)
        if self.shared is not None:
            status |= await self.shared.reports.wait_for(want)
        return status

    async def _wait_here(self, want: Want) -> dict[str, Any]:
        """Wait until this node holds its part of a want. Raises: see `wait`."""
        # A want of another node may be in the catalog, and not be planned yet
        self.holding.change()
        patience = Patience()

        def is_decided() -> bool:
            state = self._find_state(want)
            if state is None:
                return not self.holding.trouble
            obstacle = patience.look(state.missing, state.trouble if state.is_stuck else "")
            return bool(state.error or state.short or not state.missing or obstacle)

        await self.holding.wait_for(is_decided)
        state = self._find_state(want)
        if state is None:
            raise ConfigError(
                f"{want.target} is no longer wanted\nrequest it again with `megablend datasets want`"
            )
        if state.error is not None:
            raise state.error
        if state.short:
            raise ResourceError(
                f"{want.target} does not fit: the mirror is short of {state.short:,} bytes (pinned datasets and earlier "
                "wants come first and, unless this one is pinned, so does what jobs need)\n"
                f"remove other wants with `megablend datasets unwant`, raise `mirror.size`, or spread {want.target} over "
                "more nodes"
            )
        if patience.obstacle:
            raise patience.make_error(want)
        return state.as_json()

    def _find_state(self, want: Want) -> State | None:
        """Return the state of the latest revision that must be held for a want; None before the
        want is planned."""
        states = [state for state in self.holding.states if state.goal.want.name == want.name]
        return _find_latest(states) if states else None

    async def make_folder(self, target: str) -> dict[str, Any]:
        """Make the folder of a revision, or of the latest complete one if `target` names only a
        dataset. Raises: ResourceError if some bytes of the revision are missing."""
        dataset, revision = self.catalog.find(target)
        states = [
            state
            for state in self.holding.states
            if state.goal.revision.dataset == dataset and revision in (None, state.goal.revision)
        ]
        if not states:
            raise ConfigError(
                f"{target!r} is not wanted on this node\n"
                f"request it: megablend datasets want {target} --copies all --wait"
            )
        complete = [state for state in states if not state.missing]
        chosen = _find_latest(complete or states).goal.revision
        files = await self._read_files(chosen)
        batches = [files[i : i + FILES_AT_A_TIME] for i in range(0, len(files), FILES_AT_A_TIME)]
        missing: list[int] = []
        for batch in batches:
            missing += await self._engine.call(self._count_missing, batch)
        if any(missing):
            raise ResourceError(
                f"{chosen}: {sum(missing):,} of {chosen.num_bytes:,} bytes are missing on this node, in "
                f"{sum(map(bool, missing)):,} of {len(files):,} files\n"
                f"wait for them: megablend datasets want {chosen} --copies all --wait"
            )
        for batch in batches:
            await self._engine.call(self.holding.folders.make, chosen, batch)
        self.holding.change()
        path = self.holding.folders.find(chosen)
        return {"dataset": dataset, "revision": chosen.digest, "path": str(path)}

    async def find_files(self, target: str) -> tuple[Revision, Manifest]:
        """Return the revision that `target` names, and its files sorted by path. If `target` names
        only a dataset, this is the last revision whose wanted part is held on this node. Raises:
        ConfigError if there is no such revision; DataError if its manifest is damaged."""
        dataset, revision = self.catalog.find(target)
        if revision is None:
            wanted = [state for state in self.holding.states if state.goal.want.revision == LATEST]
            complete = {state.goal.revision.name for state in wanted if not state.missing}
            revisions = self.catalog.list_revisions(dataset)
            held = [candidate for candidate in revisions if candidate.name in complete]
            revision = (held or revisions)[-1]
        return revision, await self._read_files(revision)

    async def _read_files(self, revision: Revision) -> Manifest:
        return await asyncio.to_thread(self.catalog.read_files, revision.digest)

    def _count_missing(self, files: Sequence[DataFile]) -> list[int]:
        """Return the number of bytes of each file that are not held."""
        find_missing = self._engine.store.missing
        keys = [file.key for file in files]
        return [count_bytes(find_missing(key, pages_of_file(key.size)), key.size) for key in keys]

    async def verify(self, target: str) -> dict[str, Any]:
        """Compare the held pages of a dataset, or of one revision, with their checksums."""
        dataset, revision = self.catalog.find(target)
        paths = dict[FileKey, str]()
        for listed in self.catalog.find_dataset(dataset) if revision is None else [revision]:
            paths |= {file.key: file.path for file in await self._read_files(listed)}
        num_bytes = 0
        wrong = set[str]()
        for key, path in paths.items():
            for part in split_portions(await self._engine.call(self._engine.store.held, key)):
                intact, data = await self._engine.read_held(PageWant(key, part))
                num_bytes += len(data)
                if count_pages(intact) < count_pages(part):
                    wrong.add(path)
        self.holding.change()
        return {"bytes": num_bytes, "wrong": sorted(wrong)}

    async def collect(self) -> dict[str, Any]:
        """Delete all unwanted revisions except the latest one of each dataset. Also delete files
        that belong to no other revision."""
        await self.holding.wait_for(lambda: True)
        revisions = self.catalog.revisions
        kept = {state.goal.revision.name for state in self.holding.states} | {*self.catalog.wants}
        kept |= {
            self.catalog.list_revisions(recorded.dataset)[-1].name
            for recorded in revisions.values()
        }
        if self.shared is not None:
            kept |= await self.shared.reports.find_incomplete()
        old = [recorded for name, recorded in revisions.items() if name not in kept]
        if self.shared is not None:
            return await self.shared.forget(old, ())
        return await self._engine.call(self._forget, old)

    async def remove(self, dataset: str) -> dict[str, Any]:
        """Delete a dataset, and files that belong to no other dataset."""
        revisions = self.catalog.find_dataset(dataset)
        wants = [
            candidate for candidate in self.catalog.wants.values() if candidate.dataset == dataset
        ]
        for want in wants:
            if want.is_pinned:
                raise ConfigError(
                    f"{dataset} is pinned\nunpin it first: megablend datasets unpin {want.target}"
                )
        if self.shared is not None:
            return await self.shared.forget(revisions, wants)
        await self._change(deletes=wants)
        deleted = await self._engine.call(self._forget, revisions)
        self.holding.change()
        return deleted

    def _forget(self, revisions: Sequence[Revision]) -> dict[str, Any]:
        """Delete revisions, and files that belong to no other revision. Called in the store's
        thread. Returns: a JSON object with the revisions and the numbers of deleted files and
        bytes."""
        others = [
            recorded for recorded in self.catalog.revisions.values() if recorded not in revisions
        ]
        read = self.catalog.read_known_files
        kept = Kept((make_share(read(recorded.digest)), WANTED) for recorded in others)
        num_bytes = 0
        num_files = 0
        for revision in revisions:
            files = read(revision.digest)
            unused = [file.key for file in files if file.key.digest not in kept]
            sizes = [self._engine.store.remove_file(key) for key in unused]
            num_bytes += sum(sizes)
            num_files += sum(size > 0 for size in sizes)
            # Empty files count as held if other files of their revision are held
            num_files += sum(not key.size for key in unused) if any(sizes) else 0
            self.holding.folders.remove(revision, files)
            self.catalog.remove_revision(revision)
        return {"revisions": [*map(str, revisions)], "files": num_files, "bytes": num_bytes}

    def remove_all(self) -> None:
        """Delete all folders and the catalog, but not the pages. Called in the store's thread."""
        self.holding.folders.remove_all()
        self.catalog.remove()


def _find_latest(states: Sequence[State]) -> State:
    """Return the state whose revision is the latest. The given states are sorted by importance."""
    return max(states, key=lambda state: (state.goal.revision.added, state.goal.revision.digest))


def _accepts(verb: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether the method of a verb accepts these arguments."""
    try:
        inspect.signature(verb).bind(**arguments)
    except TypeError:
        return False
    return True
