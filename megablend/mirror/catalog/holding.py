"""Fetches and keeps the datasets that are wanted, in the node process.

What has to be done follows from revisions, wants, held pages and the room that there is. Nothing
else is remembered: it is computed anew at each change, and every 30 seconds.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megablend.arrays import Bools, Uint32s, Uint64s
from megablend.errors import (
    ChangedFileError,
    DataError,
    MegablendError,
    MissingFileError,
    ResourceError,
)
from megablend.mirror.catalog.catalog import LATEST, Catalog, Revision, Want
from megablend.mirror.catalog.folders import Folders
from megablend.mirror.catalog.manifest import DataFile, Manifest
from megablend.mirror.catalog.reconcile import Goal, find_short, list_goals
from megablend.mirror.catalog.share import NO_SHARE, Kept, Share, make_share
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import (
    PAGE_BYTES,
    Pages,
    count_pages,
    split_portions,
)
from megablend.mirror.disk.room import PINNED, WANTED
from megablend.mirror.members.homes import Homes
from megablend.mirror.node import engine
from megablend.mirror.node.needs import Needs
from megablend.system.log import LOG

T = TypeVar("T")
_PERIOD_SECONDS = 30.0
_RETRY_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_NUM_FETCHERS = 16
_MAX_REVISIONS = 4
"""How many of a dataset's last revisions are considered if its latest one is wanted."""
FILES_AT_A_TIME = 256
"""Files that are handled in one call of the store's thread, which other calls wait for."""
_COUNTED_AT_A_TIME = 4096
"""Files whose held pages are counted in one call of the store's thread: mostly in memory."""
FindOwn = Callable[[Uint64s, Uint32s], Awaitable[Bools]]
"""Finds which blocks of many files this node is to hold: bool [rows]. It is given the first eight
bytes of the digest of each row's file, uint64 [rows], and the blocks, uint32 [rows]."""


@dataclass(slots=True, eq=False)
class State:
    """How much of a goal is held, and what prevents the rest."""

    goal: Goal
    share: Share
    needed: int
    """Bytes of the share."""
    missing: int
    """Bytes of the share that are not held."""
    short: int = 0
    """Bytes of room that are missing for it; 0 if it fits."""
    trouble: str = ""
    gone: dict[str, type[DataError]] = field(default_factory=dict)
    """Locations of files that were deleted or replaced since they were listed, and the kind of
    error that told so."""
    error: Exception | None = None
    """An error that no waiting mends: a file was deleted or replaced, or the manifest is
    damaged."""

    @property
    def name(self) -> tuple[str, str]:
        """The name of the want, and the digest of the revision."""
        return self.goal.want.name, self.goal.revision.digest

    def as_json(self) -> dict[str, Any]:
        """The state for people and programs."""
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
    """Holds revisions that are wanted.

    Args:
        pages: the engine that fetches pages.
        needs: the needs of jobs, which come first.
        find_own: finds which pages this node is to hold.
        catalog: the revisions and wants.
        get_nodes: returns the names of all nodes, in a cluster with etcd.
    """

    def __init__(
        self,
        pages: engine.Engine,
        needs: Needs,
        find_own: FindOwn,
        catalog: Catalog,
        get_nodes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._pages = pages
        self._needs = needs
        self._find_own = find_own
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
        """Bytes that this node is to hold; of these, bytes that are missing, and that have no
        room."""
        return {
            "bytes": sum(each.needed for each in self.states),
            "missing": sum(each.missing for each in self.states),
            "short": sum(each.short for each in self.states),
        }

    def keep_all(self) -> None:
        """Keep all pages of wanted revisions, until this node's share of them is known. Called in
        the store's thread."""
        read = self._catalog.read_known_files
        self._pages.store.set_kept(
            Kept(
                (make_share(read(goal.revision.digest)), PINNED if goal.is_pinned else WANTED)
                for goal in self._list_goals(self._list_candidates(), ())
            )
        )

    def change(self) -> None:
        """Plan anew, since revisions, wants or held pages have changed."""
        self._num_changes += 1
        self._changed.set()

    def change_nodes(self) -> None:
        """Plan anew, since the nodes have changed, and so has this node's share."""
        self._num_views += 1
        self.change()

    async def wait_for(self, find: Callable[[], bool]) -> None:
        """Wait until `find` returns True after all changes up to now have been planned."""
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
            awaited = [fetching, changing]
            try:
                await asyncio.wait(
                    awaited, timeout=_PERIOD_SECONDS, return_when=asyncio.FIRST_COMPLETED
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
        """List this node's wants, each with the revisions that it may be about."""
        candidates = []
        for want in self._catalog.own_wants:
            revisions = self._catalog.list_revisions(want.dataset)
            if want.revision != LATEST:
                revisions = [each for each in revisions if each.digest == want.revision]
            candidates.append((want, revisions[-_MAX_REVISIONS:]))
        return candidates

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
        """Find out what is to be held, and tell the store to keep it. Raises: as `find_own` does;
        DataError."""
        call = self._pages.call
        for want in self._catalog.wants.values():
            if want.is_past:
                await call(self._catalog.remove_want, want)
        # If they change in the meantime, `change` is called, and all of this is done again
        candidates = self._list_candidates()
        looked = [await self._look(want, each) for want, some in candidates for each in some]
        known = {each.name: each for each in looked}
        used = {self._place_of(each.goal.want, each.goal.revision) for each in looked}
        self._shares = {place: each for place, each in self._shares.items() if place in used}
        goals = self._list_goals(candidates, {each.name for each in looked if not each.missing})
        states = [known[goal.want.name, goal.revision.digest] for goal in goals]
        capacity = await call(self._pages.store.find_capacity)
        shorts = await beside_loop(self._find_short, goals, states, capacity)
        for state, goal, short in zip(states, goals, shorts, strict=True):
            state.goal = goal
            state.short = short
        kept = [
            (each.share, PINNED if each.goal.is_pinned else WANTED)
            for each in states
            if each.goal.is_pinned or not each.short
        ]
        await call(self._pages.store.set_kept, await beside_loop(Kept, kept))
        self.states = states
        await call(self._remove_folders)

    def _find_short(
        self, goals: Sequence[Goal], states: Sequence[State], capacity: int
    ) -> list[int]:
        """What goals lack to fit."""
        wanted = Kept((state.share, WANTED) for state in states)
        needed = sum(
            count_pages(pages.masks) * PAGE_BYTES
            for key, pages in self._needs.list_needed().items()
            if key.digest not in wanted
        )
        return find_short(goals, [state.share.find_sizes() for state in states], capacity, needed)

    async def _look(self, want: Want, revision: Revision) -> State:
        goal = Goal(want, revision, want.is_pinned)
        try:
            share = await self.find_share(want, revision)
        except DataError as error:
            # What else is wanted does not wait until this manifest is there again
            state = State(goal, NO_SHARE, revision.num_bytes, revision.num_bytes)
            if self._catalog.own:
                state.trouble = f"no node has sent its manifest yet; if {revision.by} is gone, add the dataset again"
            else:
                state.trouble = str(error)
                state.error = error
            return state
        missing = 0
        for begin in range(0, len(share), _COUNTED_AT_A_TIME):
            missing += await self._pages.call(self._count_missing, share, begin)
        state = State(goal, share, share.num_bytes, missing)
        state.trouble = next((each.trouble for each in self.states if each.name == state.name), "")
        return state

    async def find_share(self, want: Want, revision: Revision) -> Share:
        """The pages of a revision that this node is to hold. Raises: as `find_own` does;
        DataError."""
        place = self._place_of(want, revision)
        if place not in self._shares:
            files = await beside_loop(self._catalog.read_files, revision.digest)
            share = await beside_loop(make_share, files)
            if not want.is_whole and not want.nodes and not want.copies:
                share = share.select(await self._find_own(share.row_ids, share.rows.blocks))
            elif not want.is_whole:
                # The pages whose homes, among these nodes alone, include this node
                names = sorted(want.nodes or self._get_nodes())
                share = await beside_loop(_select_own, share, names, self._catalog.own, want.copies)
            self._shares[place] = share
            return share
        return self._shares[place]

    def _place_of(self, want: Want, revision: Revision) -> tuple[object, ...]:
        """The key of a share in the cache: everything that it depends on."""
        return (revision.digest, want.is_whole, want.nodes, want.copies, self._num_views)

    def _count_missing(self, share: Share, begin: int) -> int:
        """How many bytes of the next files of a share are not held. Called in the store's
        thread."""
        stop = min(begin + _COUNTED_AT_A_TIME, len(share))
        held = self._pages.store.count_held(share.list_digests(begin, stop))
        is_absent = held == 0
        is_partial = ~is_absent & (held < -(-share.sizes[begin:stop] // PAGE_BYTES))
        missing = int(share.num_pages[begin:stop][is_absent].sum())
        for index in (begin + np.flatnonzero(is_partial)).tolist():
            missing += count_pages(self._find_missing(share, index).masks)
        return missing * PAGE_BYTES

    def _find_missing(self, share: Share, index: int) -> Pages:
        (digest,) = share.list_digests(index, index + 1)
        size = int(share.sizes[index])
        return self._pages.store.missing_of(digest, size, share.pages_of(index))

    def _remove_folders(self) -> None:
        held = {state.goal.revision.name for state in self.states}
        for name, revision in self._catalog.revisions.items():
            if name not in held and self.folders.find(revision).is_dir():
                files = self._catalog.read_known_files(revision.digest)
                wanted = Kept((state.share, WANTED) for state in self.states)
                self.folders.remove(revision, files, wanted)

    async def _fetch(self) -> bool:
        """Fetch what is missing and has room. Returns: whether to plan anew at once, since pages
        came, or were found to be held by now."""
        # Of these, without a manifest, nothing is known to fetch
        in_trouble = {state for state in self.states if state.missing and not state.share}
        parts = self._list_missing(in_trouble)
        turn = asyncio.Lock()
        failed: dict[FileKey | State, Exception] = {}
        num_done = 0

        async def fetch() -> None:
            nonlocal num_done
            while True:
                async with turn:
                    found = await anext(parts, None)
                if found is None:
                    return
                state, key, part, twin = found
                while self._needs.is_fetching:
                    await asyncio.sleep(_PAUSE_SECONDS)
                error = failed.get(key) or failed.get(state)
                try:
                    if error is None:
                        await self._get(key, part, twin)
                        state.missing -= count_pages(part.masks) * PAGE_BYTES
                        num_done += 1
                except Exception as new:
                    error = new
                    # Without room, or while a node is away, other files of the goal wait, too
                    has_to_wait = isinstance(error, ResourceError | engine.AwayError)
                    failed[state if has_to_wait else key] = error
                if error is not None:
                    in_trouble.add(state)
                    _note(state, error)

        try:
            await asyncio.gather(*(fetch() for _ in range(_NUM_FETCHERS)))
        except MegablendError as error:
            self.trouble = str(error)
            return False
        untroubled = [
            state for state in self.states if state not in in_trouble and state.error is None
        ]
        for state in untroubled:
            state.trouble = ""
        await self._tell()
        return num_done > 0 or any(state.missing and not state.short for state in untroubled)

    async def _get(self, key: FileKey, part: Pages, twin: FileKey | None) -> None:
        """Fetch pages, or copy them from the same file at another location, `twin`. Raises: as
        Engine.obtain."""
        if twin is not None:
            held, data = await self._pages.read_held(engine.Want(twin, part))
            if count_pages(held.masks) == count_pages(part.masks):
                store = self._pages.store
                await self._pages.call(store.write, key, part, memoryview(data), None)
        await self._pages.obtain(engine.Want(key, part))

    async def _list_missing(self, in_trouble: set[State]) -> AsyncIterator[_Part]:
        """List the missing portions that have room, the most important ones first. Raises:
        DataError.

        Args:
            in_trouble: goals without a manifest, to which those are added that have lost it.
        """
        for state in self.states:
            if not state.missing or state.short or state in in_trouble:
                continue
            try:
                files = await beside_loop(self._catalog.read_files, state.goal.revision.digest)
            except DataError as error:
                in_trouble.add(state)
                _tell(state, error)
                continue
            earlier = await beside_loop(self._read_earlier, state.goal.revision)
            for begin in range(0, len(state.share), FILES_AT_A_TIME):
                missing = await self._pages.call(self._list_parts, state.share, begin)
                for index, parts in missing.items():
                    file = files[index]
                    twin = _find_twin(file, earlier)
                    for part in parts:
                        yield _Part(state, file.key, part, twin)

    def _list_parts(self, share: Share, begin: int) -> dict[int, list[Pages]]:
        """The portions of the next files of a share that are not held, by the index of the file.
        Called in the store's thread."""
        stop = min(begin + FILES_AT_A_TIME, len(share))
        held = self._pages.store.count_held(share.list_digests(begin, stop))
        is_incomplete = held < -(-share.sizes[begin:stop] // PAGE_BYTES)
        return {
            index: list(split_portions(self._find_missing(share, index)))
            for index in (begin + np.flatnonzero(is_incomplete)).tolist()
        }

    def _read_earlier(self, revision: Revision) -> list[Manifest]:
        """The files of the revisions before the latest one of a dataset, the last one first; none
        for another revision."""
        # The revision may have been removed in the meantime
        known = self._catalog.list_revisions(revision.dataset)[-_MAX_REVISIONS:]
        if known[-1:] != [revision]:
            return []
        return [self._catalog.read_known_files(each.digest) for each in known[-2::-1]]


class _Part(NamedTuple):
    """Pages that are to be fetched."""

    state: State
    key: FileKey
    pages: Pages
    """Of one portion."""
    twin: FileKey | None
    """The same file at the location where it was before."""


def _find_twin(file: DataFile, earlier: Iterable[Manifest]) -> FileKey | None:
    """Find the same file at another location: one of an earlier revision with the same path, size
    and etag."""
    for files in earlier if file.key.etag else ():
        place = bisect_left(files, (file.path,))
        for path, key in files[place : place + 1]:
            if path == file.path and key[1:] == file.key[1:] and key != file.key:
                return key
    return None


async def beside_loop(function: Callable[..., T], *arguments: Any) -> T:
    """What a function returns that takes long where there are many files."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def _select_own(share: Share, names: Sequence[str], own: str, copies: int) -> Share:
    """The part of a share of which the node `own` is a home, if only the nodes `names` are."""
    if own not in names:
        return share.select(np.zeros(len(share.file_index), np.bool_))
    return share.select(Homes(names).find_own(own, share.row_ids, share.rows.blocks, copies))


def _note(state: State, error: Exception) -> None:
    """Record why a goal is not held, and log it if it is news."""
    if isinstance(error, MissingFileError | ChangedFileError):
        state.gone[error.path] = type(error)
        state.error = error = _explain(state)
    _tell(state, error)
    if not isinstance(error, MegablendError | engine.AwayError):
        LOG.warning("mirror: this is a bug in megablend", exc_info=error)


def _tell(state: State, error: Exception) -> None:
    """Record the trouble with a goal, and log it if it is news."""
    if state.trouble != str(error):
        state.trouble = str(error)
        LOG.warning("mirror: %s: %s", state.goal.want.target, error)


def _explain(state: State) -> DataError:
    """The error for a goal some of whose files were deleted or replaced since they were listed."""
    path, kind = min(state.gone.items())
    happened = "was deleted" if issubclass(kind, MissingFileError) else "was replaced"
    others = len(state.gone) - 1
    more = f"; {others:,} more changed" if others else ""
    dataset = state.goal.revision.dataset
    return kind(
        path,
        f"{happened} at the source after it was listed{more}\n"
        f"`megablend datasets add {dataset} SOURCE...` makes a revision of what is there now",
    )
