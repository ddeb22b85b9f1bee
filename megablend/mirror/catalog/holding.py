"""Holds what is wanted, in the node process.

What there is to do follows from revisions, wants, what is held and how much room there is; nothing
else is remembered. It is computed at each change, and every 30 seconds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import (
    ChangedFileError,
    DataError,
    MegablendError,
    MissingFileError,
    ResourceError,
)
from megablend.mirror.catalog.catalog import LATEST, Catalog, Revision, Want
from megablend.mirror.catalog.folders import Folders
from megablend.mirror.catalog.manifest import DataFile
from megablend.mirror.catalog.reconcile import Goal, find_short, list_goals
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import (
    BLOCK_BYTES,
    NO_PAGES,
    PAGE_BYTES,
    Pages,
    count_pages,
    pages_of_file,
    split_portions,
)
from megablend.mirror.disk.room import NEVER, PINNED, WANTED, Need
from megablend.mirror.members.homes import Homes
from megablend.mirror.node import engine
from megablend.mirror.node.needs import Needs
from megablend.system.log import LOG

_PERIOD_SECONDS = 30.0
_RETRY_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_NUM_FETCHERS = 16
_MOST_REVISIONS = 4
"""So many of the last revisions of a dataset whose latest is wanted are looked at."""
FILES_AT_A_TIME = 256
"""In the store's thread, for which others wait."""
Share = list[tuple[FileKey, Pages]]
"""What a node is to hold of a revision's files."""


@dataclass(slots=True, eq=False)
class State:
    """How a goal stands."""

    goal: Goal
    share: Share
    needed: int
    """Bytes of its pages."""
    missing: int
    """Of these, what is not held."""
    short: int = 0
    """Bytes that it lacks to fit."""
    trouble: str = ""
    gone: dict[str, type[DataError]] = field(default_factory=dict)
    """Locations of files that are not what was listed any more, and which error says so."""
    error: Exception | None = None
    """A file is gone, or not what it was."""

    @property
    def name(self) -> tuple[str, str]:
        """The want's, and the revision's."""
        return self.goal.want.name, self.goal.revision.digest

    def as_json(self) -> dict[str, Any]:
        """For people and programs."""
        want = self.goal.want
        return {
            "want": want.target,
            "revision": self.goal.revision.digest,
            "pinned": want.is_pinned,
            "until": want.until,
            "bytes": self.needed,
            "missing": self.missing,
            "short": self.short,
            "trouble": self.trouble,
        }


class Holding:
    """What a node holds since it is wanted.

    Args:
        pages: the engine that gets pages.
        needs: those of jobs, which come first.
        select: what this node is to hold of a need.
        catalog: what is wanted.
        get_nodes: names of all nodes, in a cluster with etcd.
    """

    def __init__(
        self,
        pages: engine.Engine,
        needs: Needs,
        select: Callable[[Need], Awaitable[Need]],
        catalog: Catalog,
        get_nodes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._pages = pages
        self._needs = needs
        self._select = select
        self._catalog = catalog
        self._get_nodes = get_nodes
        self.folders = Folders(pages.store)
        self.states: list[State] = []
        self.trouble = "not looked at yet"
        self._shares: dict[tuple[object, ...], Share] = {}
        self._num_views = 0
        self._changed = asyncio.Event()
        self._news = asyncio.Condition()
        self._num_changes = 0
        self._num_seen = -1

    def count(self) -> dict[str, int]:
        """Bytes that this node is to hold, that are missing, and that have no room."""
        return {
            "bytes": sum(each.needed for each in self.states),
            "missing": sum(each.missing for each in self.states),
            "short": sum(each.short for each in self.states),
        }

    def keep_all(self) -> None:
        """Keep all files of what is wanted, before it is known what this node's share is. In the
        store's thread."""
        goals = self._list_goals(self._list_candidates(), ())
        read = self._catalog.read_known_files
        self._keep((goal, _list_pages(read(goal.revision.digest))) for goal in goals)

    def change(self) -> None:
        """Revisions or wants have changed, or what is held."""
        self._num_changes += 1
        self._changed.set()

    def change_nodes(self) -> None:
        """What this node's share is has changed."""
        self._num_views += 1
        self.change()

    async def wait_for(self, find: Callable[[], bool]) -> None:
        """Wait until something is so, of the states as they are after all changes up to now."""
        after = self._num_changes
        async with self._news:
            await self._news.wait_for(lambda: self._num_seen >= after and find())

    async def run(self) -> None:
        """Hold what is wanted, until cancelled."""
        while True:
            self._changed.clear()
            num_changes = self._num_changes
            try:
                await self._plan()
                self.trouble = ""
                self._num_seen = num_changes
            except (MegablendError, engine.AwayError) as error:
                self.trouble = str(error)
            await self._tell()
            fetching = asyncio.ensure_future(self._fetch())
            changing = asyncio.ensure_future(self._changed.wait())
            either = [fetching, changing]
            try:
                await asyncio.wait(
                    either, timeout=_PERIOD_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if fetching.done() and not fetching.result():
                    has_trouble = self.trouble or any(state.trouble for state in self.states)
                    pause = _RETRY_SECONDS if has_trouble else _PERIOD_SECONDS
                    await asyncio.wait([changing], timeout=pause)
            finally:
                fetching.cancel()
                changing.cancel()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _list_candidates(self) -> list[tuple[Want, list[Revision]]]:
        """Wants, each with the revisions that it may be about."""
        found = []
        for want in self._catalog.own_wants:
            known = self._catalog.list_revisions(want.dataset)
            if want.revision != LATEST:
                known = [each for each in known if each.digest == want.revision]
            found.append((want, known[-_MOST_REVISIONS:]))
        return found

    def _list_goals(
        self,
        candidates: Sequence[tuple[Want, Sequence[Revision]]],
        complete: Collection[tuple[str, str]],
    ) -> list[Goal]:
        return list_goals(
            candidates,
            lambda want, revision: (want.name, revision.digest) in complete,
            lambda revision: self.folders.find(revision).is_dir(),
        )

    async def _plan(self) -> None:
        """Find out what is to be held, and have it kept. Raises: as `select` does; DataError."""
        call = self._pages.call
        for want in self._catalog.wants.values():
            if want.is_past:
                await call(self._catalog.remove_want, want)
        # They may change meanwhile: then all is done again
        candidates = self._list_candidates()
        looked = [await self._look(want, each) for want, some in candidates for each in some]
        known = {each.name: each for each in looked}
        used = {self._place_of(each.goal.want, each.goal.revision) for each in looked}
        self._shares = {place: each for place, each in self._shares.items() if place in used}
        goals = self._list_goals(candidates, {each.name for each in looked if not each.missing})
        states = [known[goal.want.name, goal.revision.digest] for goal in goals]
        sizes = [size_of(state.share) for state in states]
        wanted = {digest for each in sizes for digest in each}
        jobs = await asyncio.get_running_loop().run_in_executor(None, self._needs.list_needed)
        needed = size_of((key, some) for key, some in jobs.items() if key.digest not in wanted)
        capacity = await call(self._pages.store.find_capacity)
        shorts = find_short(goals, sizes, capacity, sum(needed.values()))
        for state, goal, short in zip(states, goals, shorts, strict=True):
            state.goal = goal
            state.short = short
        kept = [each for each in states if each.goal.is_pinned or not each.short]
        await call(self._keep, [(each.goal, each.share) for each in kept])
        self.states = states
        await call(self._remove_folders, wanted)

    async def _look(self, want: Want, revision: Revision) -> State:
        goal = Goal(want, revision, want.is_pinned)
        try:
            share = await self.find_share(want, revision)
        except DataError as error:
            # What else is wanted does not wait until this manifest is there again
            state = State(goal, [], revision.num_bytes, revision.num_bytes)
            if self._catalog.own:
                state.trouble = "no node has sent its manifest yet"
            else:
                state.trouble = str(error)
                state.error = error
            return state
        missing = 0
        for begin in range(0, len(share), FILES_AT_A_TIME):
            some = share[begin : begin + FILES_AT_A_TIME]
            missing += await self._pages.call(self.count_missing, some)
        state = State(goal, share, sum(size_of(share).values()), missing)
        state.trouble = next((each.trouble for each in self.states if each.name == state.name), "")
        return state

    async def find_share(self, want: Want, revision: Revision) -> Share:
        """What this node is to hold of a revision. Raises: as `select` does; DataError."""
        place = self._place_of(want, revision)
        if place not in self._shares:
            loop = asyncio.get_running_loop()
            files = await loop.run_in_executor(None, self._catalog.read_files, revision.digest)
            share = _list_pages(files)
            if not want.is_whole and not want.nodes and not want.copies:
                needs = [await self._select(Need.of(*each, math.inf)) for each in share]
                share = [(need.key, need.pages) for need in needs]
            elif not want.is_whole:
                # The homes among these nodes
                names = sorted(want.nodes or self._get_nodes())
                share = await loop.run_in_executor(
                    None, _select_own, share, names, self._catalog.own, want.copies
                )
            self._shares[place] = share
            return share
        return self._shares[place]

    def _place_of(self, want: Want, revision: Revision) -> tuple[object, ...]:
        """A share follows from these."""
        return (revision.digest, want.is_whole, want.nodes, want.copies, self._num_views)

    def count_missing(self, share: Share) -> int:
        """Bytes of pages that are not held. In the store's thread."""
        return PAGE_BYTES * sum(count_pages(self._find_missing(*each).masks) for each in share)

    def _find_missing(self, key: FileKey, pages: Pages) -> Pages:
        store = self._pages.store
        return NO_PAGES if store.is_complete(key) else store.missing(key, pages)

    def _keep(self, wanted: Iterable[tuple[Goal, Share]]) -> None:
        begins: dict[str, Int64s] = {}
        for goal, share in wanted:
            for key, pages in share:
                num_blocks = -(-key.size // BLOCK_BYTES)
                begin = begins.setdefault(key.digest, np.full(num_blocks, -NEVER))
                level = PINNED if goal.is_pinned else WANTED
                begin[pages.blocks] = np.maximum(begin[pages.blocks], level)
        self._pages.store.set_kept(begins)

    def _remove_folders(self, wanted: set[str]) -> None:
        held = {state.goal.revision.name for state in self.states}
        for name, revision in self._catalog.revisions.items():
            if name not in held and self.folders.find(revision).is_dir():
                files = self._catalog.read_known_files(revision.digest)
                self.folders.remove(revision, files, wanted)

    async def _fetch(self) -> bool:
        """Fetch what is missing and has room. Returns: whether what is held is to be looked at
        again: something came, perhaps before it was asked for."""
        loop = asyncio.get_running_loop()
        try:
            parts = iter(await self._pages.call(self._list_missing))
            twins = await loop.run_in_executor(None, self._find_twins)
        except MegablendError as error:
            self.trouble = str(error)
            return False
        failed: dict[FileKey | State, Exception] = {}
        in_trouble = set[State]()
        num_done = 0

        async def fetch() -> None:
            nonlocal num_done
            for state, key, part in parts:
                while self._needs.is_fetching:
                    await asyncio.sleep(_PAUSE_SECONDS)
                error = failed.get(key) or failed.get(state)
                try:
                    if error is None:
                        await self._get(key, part, twins.get(key))
                        state.missing -= count_pages(part.masks) * PAGE_BYTES
                        num_done += 1
                except Exception as new:
                    error = new
                    # Where there is no room, or a node is waited for, other files wait, too
                    has_to_wait = isinstance(error, ResourceError | engine.AwayError)
                    failed[state if has_to_wait else key] = error
                if error is not None:
                    in_trouble.add(state)
                    _note(state, error)

        await asyncio.gather(*(fetch() for _ in range(_NUM_FETCHERS)))
        well = [state for state in self.states if state not in in_trouble and state.error is None]
        for state in well:
            state.trouble = ""
        await self._tell()
        return num_done > 0 or any(state.missing and not state.short for state in well)

    async def _get(self, key: FileKey, part: Pages, twin: FileKey | None) -> None:
        """Get pages, or copy them from the same file at another location. Raises: as `obtain`."""
        if twin is not None:
            held, data = await self._pages.read_held(engine.Want(twin, part))
            if count_pages(held.masks) == count_pages(part.masks):
                store = self._pages.store
                await self._pages.call(store.write, key, part, memoryview(data), None)
        await self._pages.obtain(engine.Want(key, part))

    def _find_twins(self) -> dict[FileKey, FileKey]:
        """Files of incomplete revisions whose source has moved: their path, size and etag are those
        of a file of an earlier revision, at another location."""
        twins: dict[FileKey, FileKey] = {}
        for state in self.states:
            revision = state.goal.revision
            # It may have been removed meanwhile
            known = self._catalog.list_revisions(revision.dataset)[-_MOST_REVISIONS:]
            if state.missing and known[1:] and revision == known[-1]:
                files = self._catalog.read_known_files(revision.digest)
                own = {(file.path, *file.key[1:]): file.key for file in files if file.key.etag}
                for other in known[:-1]:
                    for path, key in self._catalog.read_known_files(other.digest):
                        new = own.get((path, key.etag, key.size))
                        if new not in (None, key):
                            twins[new] = key
        return twins

    def _list_missing(self) -> list[tuple[State, FileKey, Pages]]:
        """Portions, the most important first."""
        return [
            (state, key, part)
            for state in self.states
            if state.missing and not state.short
            for key, pages in state.share
            for part in split_portions(self._find_missing(key, pages))
        ]


def _select_own(share: Share, names: Sequence[str], own: str, copies: int) -> Share:
    """Pages whose homes, among some nodes, this one is one of."""
    if own not in names:
        return [(key, NO_PAGES) for key, _ in share]
    homes = Homes(names)
    found = []
    for key, (blocks, masks) in share:
        order = homes.order_blocks(key.digest, blocks, copies)
        is_own = (order == names.index(own)).any(axis=1)
        found.append((key, Pages(blocks[is_own], masks[is_own])))
    return found


def _list_pages(files: Sequence[DataFile]) -> Share:
    return [(file.key, pages_of_file(file.key.size)) for file in files]


def _note(state: State, error: Exception) -> None:
    if isinstance(error, MissingFileError | ChangedFileError):
        state.gone[error.path] = type(error)
        state.error = error = _explain(state)
    if state.trouble != str(error):
        state.trouble = str(error)
        LOG.warning("mirror: %s: %s", state.goal.want.target, error)
    if not isinstance(error, MegablendError | engine.AwayError):
        LOG.warning("mirror: this is a bug in megablend", exc_info=error)


def _explain(state: State) -> DataError:
    """What to do about files that are not what was listed: a run would have to be built again, a
    dataset is added again."""
    path, kind = min(state.gone.items())
    happened = "was deleted" if issubclass(kind, MissingFileError) else "was replaced"
    others = len(state.gone) - 1
    beside = f"; {others:,} more changed" if others else ""
    dataset = state.goal.revision.dataset
    return kind(
        path,
        f"{happened} at the source after it was listed{beside}\n"
        f"`megablend datasets add {dataset} SOURCE...` makes a revision of what is there now",
    )


def size_of(share: Iterable[tuple[FileKey, Pages]]) -> dict[str, int]:
    """Bytes of pages, by the digests of files."""
    return {key.digest: count_pages(pages.masks) * PAGE_BYTES for key, pages in share}
