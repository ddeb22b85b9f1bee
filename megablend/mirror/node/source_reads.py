"""A node process's reads of the source: of pages, and of states of files, once for all ranks."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    ConfigError,
    DataError,
    MissingFileError,
)
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import ranges_of_pages
from megablend.mirror.node.engine import Engine, Keep, Origins, Want, is_soon
from megablend.storage.base import Bytes, FileStat, Storage
from megablend.storage.by_scheme import make_storage
from megablend.storage.location import find_scheme
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.object_options import ObjectOptions
from megablend.system.log import LOG

T = TypeVar("T")
KnownState = tuple[int, str, float]
"""The size and the etag of a file, and the time when they were learned."""
MAX_PORTIONS = 64
"""Portions in flight at a time: so many that are needed soon, and as many others."""
_MAX_CALLS = 256
"""Blocking calls at a time: so many that one server without answers does not delay other
servers."""
_MAX_VIEWS = 4096
"""Versions of files that are kept open for reading."""
FRESH_SECONDS = 600.0
"""How long a file's state is used before the source is asked for it again."""
_STATE_SECONDS = 5.0
"""How long the source is awaited if an older state of the file is known."""


class SourceReader:
    """Reads pages of files from object stores, web servers and mounted folders.

    Args:
        options: the mirror's settings, whose prefixes say what may be read.
        objects: settings by which object stores are reached.
    """

    def __init__(self, options: MirrorOptions, objects: ObjectOptions) -> None:
        self._options = options
        unhedged = tuple((prefix, (("hedges", False),)) for prefix in options.prefixes)
        self._objects = dataclasses.replace(
            objects, mirror=None, by_prefix=(*objects.by_prefix, *unhedged)
        )
        self._storage = make_storage(objects=self._objects)
        self._views = OrderedDict[FileKey, asyncio.Future[Storage]]()
        # Apart, so that what is needed now does not wait for what is fetched ahead
        self._turns = {soon: asyncio.Semaphore(MAX_PORTIONS) for soon in (True, False)}
        self._threads = ThreadPoolExecutor(_MAX_CALLS, "megablend-source")
        self.num_bytes = 0
        """Bytes that were read."""
        self.requests = defaultdict[str, Counter[str]](Counter)
        """Numbers of reads by scheme, and by how they ended: "ok" or "failed"."""

    def add_queries(self, urls: Mapping[str, str]) -> None:
        """Use the queries of these URLs from now on. They may be signatures: they are kept in
        memory only."""
        known = dict(self._objects.urls)
        if any(known.get(url) != query for url, query in urls.items()):
            self._objects = dataclasses.replace(
                self._objects, urls=tuple((known | dict(urls)).items())
            )
            self._storage = make_storage(objects=self._objects)
            self._views.clear()

    def check_allowed(self, location: str) -> None:
        """Check that a location is below the node's prefixes. Raises: ConfigError if it is not."""
        if reason := self._options.find_refusal(location):
            raise ConfigError(
                f"{location}: {reason}\n"
                "add a prefix of it to `mirror.prefixes` on this node, which lists "
                f"{', '.join(self._options.prefixes)}"
            )

    async def ask(self, question: Callable[[Storage], T]) -> T:
        """Call a function of the source's storage in a thread, and return its result."""
        return await self._call(lambda: question(self._storage))

    async def stat(self, location: str) -> FileStat:
        """Ask the source for the state of a file. Raises: as Storage.stat does; ConfigError if the
        file may not be read."""
        self.check_allowed(location)
        return await self._call(lambda: self._storage.for_checking().stat(location))

    async def read(self, want: Want, keep: Keep) -> None:
        """See PageReader.read. Raises: ChangedFileError if the source has another version now."""
        key = want.key
        self.check_allowed(key.location)
        offsets, sizes = ranges_of_pages(want.pages, key.size)
        status = "failed"
        try:
            async with self._turns[is_soon(want.due)]:
                view = await self._open(key)
                if view.limits(key.location).is_synchronous:
                    out, _ = await self._call(
                        lambda: view.read_ranges(key.location, offsets, sizes, _allocate)
                    )
                else:
                    out, _ = await asyncio.wrap_future(
                        view.fetch(key.location, offsets, sizes, _allocate)
                    )
            status = "ok"
        finally:
            self.requests[find_scheme(key.location) or "file"][status] += 1
        self.num_bytes += len(out)
        await keep(want.pages, out.data, Origins(source=len(out)))

    async def _open(self, key: FileKey) -> Storage:
        """A view of the storage that reads this version; it is opened once, and kept."""
        opening = self._views.get(key)
        if opening is None or (opening.done() and not _has_succeeded(opening)):
            opening = asyncio.ensure_future(self._open_view(key))
            self._views[key] = opening
            if len(self._views) > _MAX_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(key)
        return await asyncio.shield(opening)

    async def _open_view(self, key: FileKey) -> Storage:
        """Make such a view. Raises: ChangedFileError if the source has another version now."""
        view = self._storage.for_reading()
        found = make_key(key.location, await self._call(lambda: view.stat(key.location)))
        if found != key:
            raise ChangedFileError(
                key.location,
                f"was replaced: {found.size} bytes, etag {found.etag}; expected {key.size} bytes, "
                f"etag {key.etag}; {CHANGED_REMEDY}",
            )
        return view

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


@dataclass(eq=False)
class States:
    """The last known states of source files: those that the engine's store remembers, and those in
    listings of datasets."""

    engine: Engine
    source: SourceReader
    find_listed: Callable[[str], Awaitable[KnownState | None]]
    """Finds the state of a file in listings of datasets."""
    _asking: dict[str, asyncio.Task[FileStat]] = field(default_factory=dict)

    async def get(self, location: str) -> FileStat:
        """The state of a file, not older than FRESH_SECONDS if the source answers.

        Raises: as Storage.stat does.
        """
        known = await self.engine.call(self.engine.store.get_state, location)
        # A state that was outdated (0) has to be asked for, whatever was listed
        if known is None or known[2]:
            found = [known, await self.find_listed(location)]
            known = max(filter(None, found), key=lambda state: state[2], default=None)
        if known is not None and 0 <= time.time() - known[2] < FRESH_SECONDS:
            return FileStat(size=known[0], etag=known[1])
        task = self._asking.get(location)
        if task is None:
            task = asyncio.ensure_future(self._ask(location))
            self._asking[location] = task
            task.add_done_callback(lambda _: self._asking.pop(location, None))
        if known is None:
            return await asyncio.shield(task)
        try:
            return await asyncio.wait_for(asyncio.shield(task), _STATE_SECONDS)
        except MissingFileError:
            raise
        except (DataError, asyncio.TimeoutError):
            LOG.warning(
                "mirror: the source of %s is not responding; assuming that it has not changed",
                location,
            )
            return FileStat(size=known[0], etag=known[1])

    async def _ask(self, location: str) -> FileStat:
        state = await self.source.stat(location)
        await self.note(location, state)
        return state

    async def note(self, location: str, state: FileStat) -> None:
        """Remember that a file has this state now. Raises: ConfigError if it may not be read."""
        self.source.check_allowed(location)
        await self.engine.call(
            self.engine.store.put_state, location, state.size, state.etag, time.time()
        )


def _has_succeeded(task: asyncio.Future[Storage]) -> bool:
    return not task.cancelled() and task.exception() is None


def make_key(location: str, state: FileStat) -> FileKey:
    """The key of a version of a file. A mounted file's has only its size and time of modification:
    its device, and perhaps its inode, differ between mounts."""
    etag = state.etag if find_scheme(location) else state.etag.partition("-")[0]
    return FileKey(location, etag, state.size)


def _allocate(size: int) -> Bytes:
    return np.empty(size, np.uint8)
