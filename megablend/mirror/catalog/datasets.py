"""Answers `megablend datasets` in the node process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megablend.errors import ConfigError, MissingFileError, ResourceError, did_you_mean
from megablend.mirror.catalog.catalog import LATEST, Catalog, Revision, Want
from megablend.mirror.catalog.holding import FILES_AT_A_TIME, FindOwn, Holding, State, beside_loop
from megablend.mirror.catalog.listings import Listings
from megablend.mirror.catalog.manifest import DataFile, Manifest
from megablend.mirror.catalog.share import Kept, make_share
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import count_bytes, count_pages, pages_of_file, split_portions
from megablend.mirror.disk.room import WANTED
from megablend.mirror.node import engine
from megablend.mirror.node.engine import AwayError, Engine
from megablend.mirror.node.needs import Needs
from megablend.mirror.node.source_reads import SourceReader

if TYPE_CHECKING:
    from megablend.mirror.catalog.mates import Mates
    from megablend.mirror.catalog.shared import SharedCatalog

_MEETING_SECONDS = 10.0


class Datasets:
    """Datasets of a mirror: verbs, each of which returns what there is to tell, for JSON. They raise
    ConfigError for what cannot be.

    Args:
        pages: the engine that gets pages.
        source: is listed, at once and again.
        catalog: what there is.
        holding: holds what is wanted.
        mates: the nodes of a cluster with etcd, which share the catalog.
    """

    def __init__(
        self,
        pages: Engine,
        source: SourceReader,
        catalog: Catalog,
        holding: Holding,
        mates: Mates | None = None,
    ) -> None:
        self._pages = pages
        self._source = source
        self.catalog = catalog
        self.holding = holding
        self._mates = mates
        self.listings = Listings(pages, source, catalog, self._put_listed, self._is_held, mates)
        self.shared: SharedCatalog | None = None
        if mates is not None:
            # It needs aiohttp
            from megablend.mirror.catalog.shared import SharedCatalog

            self.shared = SharedCatalog(
                mates, catalog, pages.call, holding, self._forget, self.listings
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
        pages: Engine,
        source: SourceReader,
        needs: Needs,
        find_own: FindOwn,
        mates: Mates | None = None,
    ) -> Datasets:
        """Those of a mirror, which keeps what is wanted from now on. Raises: DataError if what is
        wanted cannot be read."""
        catalog = await pages.call(Catalog, pages.store.folder, mates.nodes.own if mates else "")
        get_nodes = (lambda: mates.nodes.names) if mates else tuple
        holding = Holding(pages, needs, find_own, catalog, get_nodes)
        await pages.call(holding.keep_all)
        return cls(pages, source, catalog, holding, mates)

    async def run(self) -> None:
        """Hold what is wanted, until cancelled."""
        parts = (self.holding, self.listings, self.shared)
        await asyncio.gather(*(each.run() for each in parts if each is not None))

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a command asks for. Raises: as verbs do."""
        verb = self._verbs.get(request.pop("verb", ""))
        try:
            if verb is None:
                raise TypeError
            inspect.signature(verb).bind(**request)
        except TypeError:
            raise ConfigError(
                "the node process does not know this command: it runs another version of megablend\n"
                "stop it (`megablend node stop`), and try again"
            ) from None
        if self.shared is not None:
            # What was said on another node before is so here
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
        """List sources as the latest revision of a dataset. Raises: as `Listings.add` does."""
        known = self.catalog.revisions
        revision = await self.listings.add(dataset, sources, said, every)
        return asdict(revision) | {"is_new": revision.name not in known}

    async def _put_listed(self, revision: Revision, earlier: Revision | None) -> None:
        def is_due() -> bool:
            # It may have been removed, or listed anew, meanwhile
            known = self.catalog.list_revisions(revision.dataset)
            return earlier is None or known[-1:] == [earlier]

        await self._change([revision], is_due=is_due)

    async def _is_held(self, revision: Revision) -> bool:
        """Whether a dataset's latest revision is held where that is wanted, as far as it can be; not,
        if that is not known because etcd is away."""
        with contextlib.suppress(asyncio.TimeoutError, ResourceError):
            await asyncio.wait_for(self.holding.wait_for(lambda: True), _MEETING_SECONDS)
            for state in self.holding.states:
                is_it = state.goal.revision == revision and state.goal.want.revision == LATEST
                if is_it and state.missing and not state.short and state.error is None:
                    return False
            return self.shared is None or await self.shared.told.is_settled(revision.dataset)
        return False

    async def _change(
        self,
        puts: Sequence[Revision | Want] = (),
        deletes: Sequence[Want] = (),
        is_due: Callable[[], bool] = lambda: True,
    ) -> None:
        if self.shared is not None:
            await self.shared.change(puts, deletes, is_due)
        elif is_due():
            for each in puts:
                is_want = isinstance(each, Want)
                put = self.catalog.put_want if is_want else self.catalog.put_revision
                await self._pages.call(put, each)
            for want in deletes:
                await self._pages.call(self.catalog.remove_want, want)
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
        """Want a dataset."""
        dataset, revision = self.catalog.find(target)
        latest = self.catalog.find_dataset(dataset)[-1]
        if pin and revision is None:
            raise ConfigError(
                f"{target!r}: a pinned dataset needs a revision, since it is never updated\n"
                f"pin the latest one: {latest}"
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
        want = self.catalog.date_want(self._check_nodes(want))
        await self._check_size(want, revision or latest)
        await self._change([want])
        return {"want": want.target}

    def _check_nodes(self, want: Want) -> Want:
        """The same, with the copies that it is to have. Raises: ConfigError if nodes are unknown."""
        if self._mates is None:
            if want.nodes or want.copies:
                raise ConfigError(
                    f"{want.target}: this node cannot share wants with other nodes\n"
                    "run the command on each of them, without `--nodes` and `--copies N`, or set `nodes: etcd` under `mirror`"
                )
            return want
        names = self._mates.nodes.names
        if not names and (want.nodes or want.copies):
            raise ResourceError(
                f"{want.target}: the nodes have not connected to one another yet\ntry again when they have: "
                "`megablend node status` names the missing ones"
            )
        for node in want.nodes:
            if node not in names:
                near = did_you_mean(node, names, before=": ")
                raise ConfigError(
                    f"{node!r} is not one of the {len(names)} nodes{near}\n"
                    "`megablend node status` shows the name of this node: host:port"
                )
        among = want.nodes or names
        if want.copies > len(among):
            raise ConfigError(
                f"{want.target}: {want.copies} copies cannot be kept on {len(among)} nodes\n"
                "request fewer, or `all`, or list more nodes"
            )
        if want.nodes and not want.copies:
            return replace(want, copies=min(self._mates.nodes.copies, len(among)))
        return want

    async def _check_size(self, want: Want, revision: Revision) -> None:
        """Raises: ConfigError if there can never be room for a revision."""
        others = [each for each in self.catalog.own_wants if each.is_pinned]
        if want.nodes and self.catalog.own not in want.nodes:
            return

        async def find_sizes() -> tuple[int, int]:
            """Bytes of it, and of what is pinned beside it."""
            share = await self.holding.find_share(want, revision)
            own = await beside_loop(share.find_sizes)
            united = own
            for other in others:
                if want.is_pinned and other.name in self.catalog.revisions:
                    known = self.catalog.revisions[other.name]
                    share = await self.holding.find_share(other, known)
                    united = await beside_loop(united.unite, share.find_sizes())
            return own.num_bytes, united.num_bytes - own.num_bytes

        try:
            size, beside = await asyncio.wait_for(find_sizes(), _MEETING_SECONDS)
        except (asyncio.TimeoutError, ResourceError, AwayError, MissingFileError):
            return  # what this node's share is shows when the nodes have met
        capacity = await self._pages.call(self._pages.store.find_capacity)
        if beside + size > capacity:
            raise ConfigError(
                f"{want.target} can never fit: this node would have to hold {size:,} bytes of it in addition to "
                f"{beside:,} pinned bytes, but its mirror has room for {capacity:,}\n"
                "raise `mirror.size`, free space, or spread it over more nodes"
            )

    async def unwant(self, target: str) -> dict[str, Any]:
        """Do not want a dataset any more."""
        want = self._find_want(target)
        await self._change(deletes=[want])
        return {"want": want.target}

    async def pin(self, target: str) -> dict[str, Any]:
        """Pin a revision, wanted or not."""
        dataset, revision = self.catalog.find(target)
        earlier = self.catalog.wants.get(f"{dataset}@{revision and revision.digest}")
        if earlier is None or revision is None:
            return await self.want(target, pin=True)
        want = replace(earlier, is_pinned=True)
        await self._check_size(want, revision)
        await self._change([want])
        return {"want": want.target}

    async def unpin(self, target: str) -> dict[str, Any]:
        """Want a revision without pinning it."""
        want = replace(self._find_want(target), is_pinned=False)
        await self._change([want])
        return {"want": want.target}

    def _find_want(self, target: str) -> Want:
        dataset, revision = self.catalog.find(target)
        name = f"{dataset}@{LATEST}" if revision is None else revision.name
        wants = {each.name: each for each in self.catalog.wants.values() if not each.is_past}
        if (want := wants.get(name)) is not None:
            return want
        others = [each.target for each in wants.values() if each.dataset == dataset]
        raise ConfigError(
            f"{target!r} is not wanted on this node\nwanted revisions of {dataset!r}: {', '.join(others) or 'none'}"
        )

    async def list_all(self) -> dict[str, Any]:
        """Revisions, and wants, of all nodes that share a catalog."""
        revisions = self.catalog.revisions.values()
        ordered = sorted(revisions, key=lambda each: (each.dataset, each.added))
        return {
            "revisions": [asdict(each) for each in ordered],
            "wants": [each.target for each in self.catalog.wants.values() if not each.is_past],
            "listed": await self._find_listed(),
        }

    async def _find_listed(self) -> dict[str, Any]:
        """When sources were listed, and what was wrong: of this node, and of those that etcd tells of."""
        told: dict[str, Any] = {}
        if self.shared is not None:
            with contextlib.suppress(ResourceError):
                told = await self.shared.told.read_listed()
        return told | self.listings.describe()

    async def get_status(self) -> dict[str, Any]:
        """What is wanted, and how it stands: here, and on all nodes that share a catalog."""
        found: dict[str, Any] = {
            "capacity": await self._pages.call(self._pages.store.find_capacity),
            "trouble": self.holding.trouble,
            "goals": [each.as_json() for each in self.holding.states if not each.goal.want.is_past],
            "listed": await self._find_listed(),
        }
        if self.shared is not None and self._mates is not None:
            found["trouble"] = self.shared.trouble or found["trouble"]
            found["away"] = sorted(self._mates.nodes.find_away())
            try:
                found["wants"] = await self.shared.told.read_held()
            except ResourceError as error:
                found["trouble"] = str(error)
        return found

    async def wait(self, target: str) -> dict[str, Any]:
        """Return when what is wanted is held, on all nodes where it is. Raises: ResourceError if there
        is no room for it; DataError if files are gone; ConfigError if the nodes cannot work together."""
        want = self._find_want(target)
        if self._mates is not None:
            # Too few nodes are waited for
            with contextlib.suppress(ResourceError):
                await self._mates.nodes.meet()
        found: dict[str, Any] = {"want": want.target}
        if not want.nodes or self.catalog.own in want.nodes:
            found = await self._wait_here(want)
        return found if self.shared is None else found | await self.shared.told.wait_for(want)

    async def _wait_here(self, want: Want) -> dict[str, Any]:
        # Where other nodes tell of it, it may be known, and not be looked at yet
        self.holding.change()
        last: State | None = None

        def find() -> bool:
            nonlocal last
            found = [each for each in self.holding.states if each.goal.want.name == want.name]
            last = found[-1] if found else None
            if last is None:
                return not self.holding.trouble
            return bool(last.error or last.short or not last.missing)

        await self.holding.wait_for(find)
        if last is None:
            raise ConfigError(f"{want.target} is no longer wanted\nrequest it again")
        if last.error is not None:
            raise last.error
        if last.short:
            raise ResourceError(
                f"{want.target} does not fit: it needs {last.short:,} bytes more than are left after pinned datasets, "
                "earlier wants and the data of jobs\n"
                "unwant something, raise `mirror.size`, or spread it over more nodes"
            )
        return last.as_json()

    async def make_folder(self, target: str) -> dict[str, Any]:
        """The folder of a revision that is held; of the latest one that is. Raises: ResourceError if
        something is missing."""
        dataset, revision = self.catalog.find(target)
        held = [
            state
            for state in self.holding.states
            if state.goal.revision.dataset == dataset and revision in (None, state.goal.revision)
        ]
        if not held:
            raise ConfigError(
                f"{target!r} is not wanted on this node\n"
                f"request it: megablend datasets want {target} --copies all --wait"
            )
        chosen = ([each for each in held if not each.missing] or held)[-1].goal.revision
        files = await self._read_files(chosen)
        parts = [files[i : i + FILES_AT_A_TIME] for i in range(0, len(files), FILES_AT_A_TIME)]
        missing = [each for some in parts for each in await self._pages.call(self._count, some)]
        if any(missing):
            raise ResourceError(
                f"{chosen}: {sum(missing):,} of {chosen.num_bytes:,} bytes are missing on this node, in "
                f"{sum(map(bool, missing)):,} of {len(files):,} files\n"
                f"wait for them: megablend datasets want {chosen} --copies all --wait"
            )
        for some in parts:
            await self._pages.call(self.holding.folders.make, chosen, some)
        self.holding.change()
        path = self.holding.folders.find(chosen)
        return {"dataset": dataset, "revision": chosen.digest, "path": str(path)}

    async def find_files(self, target: str) -> tuple[Revision, Manifest]:
        """A revision, and its files sorted by path; of the latest the last one that is held as it is
        wanted here. Raises: ConfigError if there is none; DataError if its manifest is damaged."""
        dataset, revision = self.catalog.find(target)
        if revision is None:
            known = self.catalog.list_revisions(dataset)
            wanted = [each for each in self.holding.states if each.goal.want.revision == LATEST]
            held = {each.goal.revision.name for each in wanted if not each.missing}
            revision = ([each for each in known if each.name in held] or known)[-1]
        return revision, await self._read_files(revision)

    async def _read_files(self, revision: Revision) -> Manifest:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self.catalog.read_files, revision.digest)

    def _count(self, files: Sequence[DataFile]) -> list[int]:
        """Bytes of each that are not held."""
        find_missing = self._pages.store.missing
        keys = [file.key for file in files]
        return [count_bytes(find_missing(key, pages_of_file(key.size)), key.size) for key in keys]

    async def verify(self, target: str) -> dict[str, Any]:
        """Compare what is held of a dataset, or of one revision, with its checksums."""
        dataset, revision = self.catalog.find(target)
        files = dict[FileKey, str]()
        for each in self.catalog.find_dataset(dataset) if revision is None else [revision]:
            files |= {file.key: file.path for file in await self._read_files(each)}
        num_bytes = 0
        wrong = set[str]()
        for key, path in files.items():
            for part in split_portions(await self._pages.call(self._pages.store.held, key)):
                right, data = await self._pages.read_held(engine.Want(key, part))
                num_bytes += len(data)
                if count_pages(right.masks) < count_pages(part.masks):
                    wrong.add(path)
        self.holding.change()
        return {"bytes": num_bytes, "wrong": sorted(wrong)}

    async def collect(self) -> dict[str, Any]:
        """Forget revisions that nobody wants, but each dataset's latest, and delete what only they
        had."""
        await self.holding.wait_for(lambda: True)
        known = self.catalog.revisions
        kept = {each.goal.revision.name for each in self.holding.states} | {*self.catalog.wants}
        kept |= {self.catalog.list_revisions(each.dataset)[-1].name for each in known.values()}
        # What is left in a folder is the copy of another revision, too
        find = self.holding.folders.find
        kept |= {name for name, each in known.items() if find(each).exists()}
        if self.shared is not None:
            kept |= await self.shared.told.find_unsettled()
        old = [each for name, each in known.items() if name not in kept]
        if self.shared is not None:
            return await self.shared.forget(old, ())
        return await self._pages.call(self._forget, old)

    async def remove(self, dataset: str) -> dict[str, Any]:
        """Forget a dataset, and delete what only it had."""
        known = self.catalog.find_dataset(dataset)
        wants = [each for each in self.catalog.wants.values() if each.dataset == dataset]
        for want in wants:
            if want.is_pinned:
                raise ConfigError(
                    f"{dataset} is pinned\nunpin it first: megablend datasets unpin {want.target}"
                )
        if self.shared is not None:
            return await self.shared.forget(known, wants)
        await self._change(deletes=wants)
        done = await self._pages.call(self._forget, known)
        self.holding.change()
        return done

    def _forget(self, revisions: Sequence[Revision]) -> dict[str, Any]:
        others = [each for each in self.catalog.revisions.values() if each not in revisions]
        read = self.catalog.read_known_files
        kept = Kept((make_share(read(each.digest)), WANTED) for each in others)
        num_bytes = 0
        num_files = 0
        for revision in revisions:
            files = read(revision.digest)
            gone = [file.key for file in files if file.key.digest not in kept]
            sizes = [self._pages.store.remove_file(key) for key in gone]
            num_bytes += sum(sizes)
            # An empty file is held where others of its revision are
            num_files += sum(size > 0 for size in sizes)
            num_files += sum(not key.size for key in gone) if any(sizes) else 0
            self.holding.folders.remove(revision, files, ())
            self.catalog.remove_revision(revision)
        return {"revisions": [*map(str, revisions)], "files": num_files, "bytes": num_bytes}

    def remove_all(self) -> None:
        """Delete all that is not the mirror's itself; in the store's thread."""
        self.holding.folders.remove_all()
        self.catalog.remove()
