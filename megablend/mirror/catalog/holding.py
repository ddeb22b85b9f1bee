"""Fetches and keeps wanted datasets, in the node process.

A plan determines which pages must be held. It depends only on the revisions, the wants, the held
pages and the room in the mirror, and is not stored: a new plan is made after each change, and every
30 seconds.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megablend.errors import DataError, MegablendError, ResourceError
from megablend.mirror.catalog.catalog import LATEST, Catalog, Revision, Want
from megablend.mirror.catalog.folders import Folders
from megablend.mirror.catalog.goal_state import State
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
from megablend.mirror.node.engine import AwayError, Engine
from megablend.mirror.node.engine import Want as PageWant
from megablend.mirror.node.needs import Needs
from megablend.storage.objects.clients import find_fault

if TYPE_CHECKING:
    from megablend.mirror.peers.cluster import Cluster

_PERIOD_SECONDS = 30.0
"""The maximum number of seconds between two plans, and for a round of fetching. Rounds are limited
since a request to a source may be repeated for ten minutes before it fails."""
_FAULT_SECONDS = 10.0
"""Seconds for which requests to a source may fail before the problem is reported."""
_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_NUM_FETCHERS = 16
_MAX_REVISIONS = 4
"""If the latest revision of a dataset is wanted, its last four revisions are considered, in
addition to revisions that are held already."""
FILES_AT_A_TIME = 256
"""The maximum number of files per call in the store's thread, since other calls have to wait."""
_COUNTED_AT_A_TIME = 4096
"""Like FILES_AT_A_TIME, for counting held pages. It is larger, since most counts are in memory."""


class Holding:
    """Keeps wanted revisions on this node: plans what must be held, and fetches missing pages.

    Args:
        engine: fetches missing pages.
        needs: the pages that jobs will read, which have priority.
        catalog: contains the revisions and wants.
        cluster: the nodes among which wanted revisions are divided; None if there are no other nodes.
    """

    def __init__(
        self, engine: Engine, needs: Needs, catalog: Catalog, cluster: Cluster | None = None
    ) -> None:
        self.engine = engine
        self._needs = needs
        self.catalog = catalog
        self._cluster = cluster
        self.folders = Folders(engine.store)
        self.states: list[State] = []
        self.trouble = "not checked yet"
        self._shares: dict[tuple[object, ...], Share] = {}
        """The shares that were computed last. The keys come from `_share_key`."""
        self._num_views = 0
        self._changed = asyncio.Event()
        self._news = asyncio.Condition()
        self._num_changes = 0
        self._num_planned = -1
        """The number of changes when the last plan was made; -1 before the first plan."""

    def count(self) -> dict[str, int]:
        """Return the numbers of bytes that must be held, that are missing, and that do not fit."""
        return {
            "bytes": sum(state.needed for state in self.states),
            "missing": sum(state.missing for state in self.states),
            "short": sum(state.short for state in self.states),
        }

    def keep_all(self) -> None:
        """Keep all held pages of wanted revisions until this node's share of each is known. Called
        in the store's thread."""
        read = self.catalog.read_known_files
        kept = []
        for want, revisions in self._list_candidates():
            # It is not known yet which revisions are complete
            for revision in revisions:
                is_pinned = want.is_pinned or self._has_folder(revision)
                kept.append((make_share(read(revision.digest)), PINNED if is_pinned else WANTED))
        self.engine.store.set_kept(Kept(kept))

    def change(self) -> None:
        """Request a new plan, because revisions, wants or held pages have changed."""
        self._num_changes += 1
        self._changed.set()

    def change_nodes(self) -> None:
        """Request a new plan, because the nodes and therefore this node's shares have changed."""
        self._num_views += 1
        self.change()

    async def wait_for(self, is_met: Callable[[], bool]) -> None:
        """Wait until a plan reflects all previous changes, and `is_met` returns True."""
        num_changes = self._num_changes
        async with self._news:
            await self._news.wait_for(lambda: self._num_planned >= num_changes and is_met())

    async def run(self) -> None:
        """Plan and fetch wanted revisions, until cancelled."""
        while True:
            self._changed.clear()
            num_changes = self._num_changes
            try:
                await self._plan()
                self.trouble = ""
                self._num_planned = num_changes
            except (MegablendError, AwayError) as error:
                self.trouble = str(error)
            await self._notify()
            fetching = asyncio.ensure_future(self._fetch())
            changing = asyncio.ensure_future(self._changed.wait())
            awaited = [fetching, changing]
            try:
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                if fetching.done() and not fetching.result():
                    has_trouble = self.trouble or any(state.trouble for state in self.states)
                    pause = _RETRY_SECONDS if has_trouble else _PERIOD_SECONDS
                    await asyncio.wait([changing], timeout=pause)
            finally:
                fetching.cancel()
                changing.cancel()

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _list_candidates(self, *, all_earlier: bool = False) -> list[tuple[Want, list[Revision]]]:
        """Return this node's wants, each with the revisions that may have to be held for it, the
        latest last. Revisions before the last _MAX_REVISIONS are included only if they are planned
        already, or if `all_earlier` is set."""
        held = {state.name for state in self.states}
        candidates = []
        for want in self.catalog.own_wants:
            revisions = self.catalog.list_revisions(want.dataset)
            if want.revision != LATEST:
                revisions = [revision for revision in revisions if revision.digest == want.revision]
            earlier = [
                revision
                for revision in revisions[:-_MAX_REVISIONS]
                if all_earlier or (want.name, revision.digest) in held or self._has_folder(revision)
            ]
            candidates.append((want, [*earlier, *revisions[-_MAX_REVISIONS:]]))
        return candidates

    def _has_folder(self, revision: Revision) -> bool:
        return self.folders.find(revision).is_dir()

    async def _plan(self) -> None:
        """Determine which pages must be held, and make the store keep them. Raises: the errors of
        `Cluster.meet`; DataError."""
        call = self.engine.call
        for want in self.catalog.wants.values():
            if want.is_past:
                await call(self.catalog.remove_want, want)
        # If wants or revisions change from here on, `change` is called, and a new plan is made
        candidates = self._list_candidates(all_earlier=self._num_planned < 0)
        inspected: list[State] = []
        for want, revisions in candidates:
            for revision in reversed(revisions):
                inspected.append(await self._inspect(want, revision))
                # Earlier revisions are not needed
                if not inspected[-1].missing:
                    break
        state_of = {state.name: state for state in inspected}
        used = {self._share_key(state.goal.want, state.goal.revision) for state in inspected}
        self._shares = {key: share for key, share in self._shares.items() if key in used}
        complete = {name for name, state in state_of.items() if not state.missing}
        goals = list_goals(candidates, complete, self._has_folder)
        states = [state_of[goal.want.name, goal.revision.digest] for goal in goals]
        capacity = await call(self.engine.store.find_capacity)
        shorts = await asyncio.to_thread(self._find_short, goals, states, capacity)
        for state, goal, short in zip(states, goals, shorts, strict=True):
            state.goal = goal
            state.short = short
        kept = [
            (planned.share, PINNED if planned.goal.is_pinned else WANTED)
            for planned in states
            if planned.goal.is_pinned or not planned.short
        ]
        await call(self.engine.store.set_kept, await asyncio.to_thread(Kept, kept))
        self.states = states
        await call(self._remove_folders)

    def _find_short(
        self, goals: Sequence[Goal], states: Sequence[State], capacity: int
    ) -> list[int]:
        """Return the number of bytes by which each goal is too large: see
        `reconcile.find_short`."""
        wanted = Kept((state.share, WANTED) for state in states)
        needed = sum(
            count_pages(pages) * PAGE_BYTES
            for key, pages in self._needs.list_needed().items()
            if key.digest not in wanted
        )
        return find_short(goals, [state.share.find_sizes() for state in states], capacity, needed)

    async def _inspect(self, want: Want, revision: Revision) -> State:
        """Return the state of a revision that may have to be held. Raises: see `Cluster.meet`."""
        goal = Goal(want, revision, want.is_pinned)
        try:
            share = await self.find_share(want, revision)
        except DataError as error:
            # Other revisions do not wait until this manifest is available again
            state = State(goal, NO_SHARE, revision.num_bytes, revision.num_bytes, is_noted=True)
            if self.catalog.own:
                # A node that may have the manifest may be unreachable
                away = () if self._cluster is None else self._cluster.find_away()
                state.is_stuck = not away
                state.trouble = (
                    f"no node has sent the manifest of this revision yet; if {revision.by} no longer exists, add the dataset "
                    "again"
                )
            else:
                state.trouble = str(error)
                state.error = error
            return state
        missing = 0
        for begin in range(0, len(share), _COUNTED_AT_A_TIME):
            missing += await self.engine.call(self._count_missing, share, begin)
        state = State(goal, share, share.num_bytes, missing)
        for earlier in self.states:
            if earlier.name == state.name:
                state.keep_trouble(earlier)
        return state

    async def find_share(self, want: Want, revision: Revision) -> Share:
        """Return this node's share of a revision: the pages that the node must hold. Raises: as
        `Cluster.meet`; DataError."""
        key = self._share_key(want, revision)
        if key in self._shares:
            return self._shares[key]
        files = await asyncio.to_thread(self.catalog.read_files, revision.digest)
        share = await asyncio.to_thread(make_share, files)
        cluster = self._cluster
        if cluster is not None and not want.is_whole:
            if not want.nodes:
                await cluster.meet()
            # The pages whose homes, among these nodes alone, include this node
            names = sorted(want.nodes or cluster.names)
            copies = want.copies or cluster.copies
            share = await asyncio.to_thread(_select_own, share, names, cluster.own, copies)
        self._shares[key] = share
        return share

    def _share_key(self, want: Want, revision: Revision) -> tuple[object, ...]:
        """Return a cache key of a share: everything that the share depends on."""
        return (revision.digest, want.is_whole, want.nodes, want.copies, self._num_views)

    def _count_missing(self, share: Share, begin: int) -> int:
        """Return the number of missing bytes in at most _COUNTED_AT_A_TIME files of a share, from
        index `begin` on. Called in the store's thread."""
        stop = min(begin + _COUNTED_AT_A_TIME, len(share))
        held = self.engine.store.count_held(share.list_digests(begin, stop))
        is_absent = held == 0
        is_partial = ~is_absent & (held < -(-share.sizes[begin:stop] // PAGE_BYTES))
        missing = int(share.num_pages[begin:stop][is_absent].sum())
        for index in (begin + np.flatnonzero(is_partial)).tolist():
            missing += count_pages(self._find_missing(share, index))
        return missing * PAGE_BYTES

    def _find_missing(self, share: Share, index: int) -> Pages:
        (digest,) = share.list_digests(index, index + 1)
        size = int(share.sizes[index])
        return self.engine.store.missing_of(digest, size, share.pages_of(index))

    def _remove_folders(self) -> None:
        """Remove the folders of revisions that need not be held. Called in the store's thread."""
        held = {state.goal.revision.name for state in self.states}
        for name, revision in self.catalog.revisions.items():
            if name not in held and self._has_folder(revision):
                self.folders.remove(revision, self.catalog.read_known_files(revision.digest))

    async def _fetch(self) -> bool:
        """Fetch missing pages for which there is room, in a round of at most _PERIOD_SECONDS.
        Returns: True if a new plan should be made at once, because pages were fetched, are being
        fetched, or turned out to be held already."""
        # Without a manifest, it is unknown what to fetch
        in_trouble = {state for state in self.states if state.missing and not state.share}
        parts = self._list_missing(in_trouble)
        turn = asyncio.Lock()  # a generator cannot be advanced by two fetchers at a time
        failed: dict[FileKey | State, Exception] = {}
        coming: dict[int, tuple[_Part, float]] = {}
        """The part that each fetcher is waiting for, and the time at which the wait began. The keys
        are the numbers of the fetchers."""
        num_done = 0

        async def fetch(number: int) -> None:
            nonlocal num_done
            while True:
                async with turn:
                    part = await anext(parts, None)
                if part is None:
                    return
                state = part.state
                while self._needs.is_fetching:
                    await asyncio.sleep(_PAUSE_SECONDS)
                error = failed.get(part.key) or failed.get(state)
                coming[number] = part, time.monotonic()
                try:
                    if error is None:
                        await self._get(part)
                        state.missing -= count_pages(part.pages) * PAGE_BYTES
                        num_done += 1
                except Exception as new:
                    error = new
                    # If there is no room, or a node is away, other files of the goal also wait
                    has_to_wait = isinstance(error, ResourceError | AwayError)
                    failed[state if has_to_wait else part.key] = error
                del coming[number]
                if error is not None:
                    in_trouble.add(state)
                    state.note(error)

        end = time.monotonic() + _PERIOD_SECONDS
        tasks = [asyncio.ensure_future(fetch(i)) for i in range(_NUM_FETCHERS)]
        pending = set(tasks)
        try:
            while pending and time.monotonic() < end:
                done, pending = await asyncio.wait(pending, timeout=_LOOK_SECONDS)
                for task in done:
                    task.result()  # raises the error of a task that failed
                for part, since in coming.values():
                    is_late = time.monotonic() - since >= _FAULT_SECONDS
                    if is_late and not part.state.is_noted:
                        fault = find_fault(part.key.location, _FAULT_SECONDS)
                        if fault is not None:
                            part.state.note(fault)
        except MegablendError as error:
            self.trouble = str(error)
            return False
        finally:
            for task in tasks:
                task.cancel()
        for state in self.states:
            state.end_round()
        await self._notify()
        has_come = any(
            state.missing and not state.short and state.error is None
            for state in self.states
            if state not in in_trouble
        )
        return num_done > 0 or bool(pending) or has_come

    async def _get(self, part: _Part) -> None:
        """Fetch the pages of a part, or copy them from the file's twin if that has all of them.
        Raises: the errors of `Engine.obtain`."""
        key = part.key
        pages = part.pages
        if part.twin is not None:
            held, data = await self.engine.read_held(PageWant(part.twin, pages))
            if count_pages(held) == count_pages(pages):
                store = self.engine.store
                await self.engine.call(store.write, key, pages, memoryview(data), math.inf)
        # Returns at once for pages that are held already
        await self.engine.obtain(PageWant(key, pages))

    async def _list_missing(self, in_trouble: set[State]) -> AsyncIterator[_Part]:
        """Yield the missing portions of goals that fit, the most important goals first. If the
        fetches of a goal fail, callers may add the goal to `in_trouble`. From then on, it yields
        one portion at a time, in turn with the others. Goals without a manifest are skipped, and
        added to `in_trouble`. Raises: DataError."""
        waiting = deque(
            (state, self._list_missing_of(state, in_trouble))
            for state in self.states
            if state.missing and not state.short and state not in in_trouble
        )
        had_trouble = {state for state in self.states if state.trouble}
        while waiting:
            state, parts = waiting[0]
            part = await anext(parts, None)
            if part is None:
                waiting.popleft()
                continue
            if state in in_trouble or state in had_trouble:
                waiting.rotate(-1)
            yield part

    async def _list_missing_of(self, state: State, in_trouble: set[State]) -> AsyncIterator[_Part]:
        """Yield the missing portions of a goal. Raises: see `_list_missing`."""
        try:
            files = await asyncio.to_thread(self.catalog.read_files, state.goal.revision.digest)
        except DataError as error:
            in_trouble.add(state)
            state.put_trouble(str(error), is_stuck=not self.catalog.own)
            return
        earlier = await asyncio.to_thread(self._read_earlier, state.goal.revision)
        for begin in range(0, len(state.share), FILES_AT_A_TIME):
            missing = await self.engine.call(self._list_portions, state.share, begin)
            for index, portions in missing.items():
                file = files[index]
                twin = _find_twin(file, earlier)
                for pages in portions:
                    yield _Part(state, file.key, pages, twin)

    def _list_portions(self, share: Share, begin: int) -> dict[int, list[Pages]]:
        """Return the missing portions of at most FILES_AT_A_TIME files of a share, from index
        `begin` on. The keys are the indices of the files. Called in the store's thread."""
        stop = min(begin + FILES_AT_A_TIME, len(share))
        held = self.engine.store.count_held(share.list_digests(begin, stop))
        is_incomplete = held < -(-share.sizes[begin:stop] // PAGE_BYTES)
        return {
            index: list(split_portions(self._find_missing(share, index)))
            for index in (begin + np.flatnonzero(is_incomplete)).tolist()
        }

    def _read_earlier(self, revision: Revision) -> list[Manifest]:
        """Return the manifests of a few earlier revisions of a dataset, the latest first, if
        `revision` is the dataset's latest one; otherwise an empty list."""
        # The revision may have been removed in the meantime
        revisions = self.catalog.list_revisions(revision.dataset)[-_MAX_REVISIONS:]
        if revisions[-1:] != [revision]:
            return []
        return [self.catalog.read_known_files(earlier.digest) for earlier in revisions[-2::-1]]


class _Part(NamedTuple):
    """Pages to fetch, all from one portion of a file."""

    state: State
    key: FileKey
    pages: Pages
    twin: FileKey | None
    """The same file at an earlier location, to copy pages from; None if there is none."""


def _find_twin(file: DataFile, earlier: Iterable[Manifest]) -> FileKey | None:
    """Return the twin of a file: a file of an earlier revision that has the same path, size and
    etag but another location. None if there is none."""
    for files in earlier if file.key.etag else ():
        index = bisect_left(files, (file.path,))
        for path, key in files[index : index + 1]:
            if path == file.path and key[1:] == file.key[1:] and key != file.key:
                return key
    return None


def _select_own(share: Share, names: Sequence[str], own: str, copies: int) -> Share:
    """Return the part of a share that the node `own` must hold, if each page is held by `copies` of
    the nodes `names`."""
    if own not in names:
        return share.select(np.zeros(len(share.file_index), np.bool_))
    return share.select(Homes(names).find_own(own, share.row_ids, share.pieces, copies))
