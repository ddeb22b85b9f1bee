"""What a node process asks the source: pages, and states of files, once for all ranks."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
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
MAX_PORTIONS = 64
"""In flight at a time, of what is needed soon, and of the rest."""
_MAX_WAITS = 256
"""Files whose state is asked for at a time: one server that does not answer holds up no other."""
_MAX_VIEWS = 4096
"""Files of which a version is being read."""
FRESH_SECONDS = 600.0
"""For so long a file's state is not asked for again."""
_STATE_SECONDS = 5.0
"""A source that is not heard of for so long is not waited for where an older state is known."""


class SourceReader:
    """Reads pages of files from object stores, web servers and mounted folders.

    Args:
        options: whose prefixes say what may be read.
        objects: how object stores are reached.
    """

    def __init__(self, options: MirrorOptions, objects: ObjectOptions) -> None:
        self._options = options
        once = tuple((prefix, (("hedges", False),)) for prefix in options.prefixes)
        self._objects = dataclasses.replace(
            objects, mirror=None, by_prefix=(*objects.by_prefix, *once)
        )
        self._storage = make_storage(objects=self._objects)
        self._views = OrderedDict[FileKey, asyncio.Future[Storage]]()
        # What is needed now does not wait for what is fetched ahead
        self._turns = {soon: asyncio.Semaphore(MAX_PORTIONS) for soon in (True, False)}
        self._threads = ThreadPoolExecutor(_MAX_WAITS, "megablend-source")
        self.num_bytes = 0
        """Bytes that were read."""
        self.requests = defaultdict[str, Counter[str]](Counter)
        """How many reads ended how, by scheme."""

    def add_queries(self, urls: Mapping[str, str]) -> None:
        """Use queries of URLs, which may be signatures; they are kept in memory only."""
        known = dict(self._objects.urls)
        if any(known.get(url) != query for url, query in urls.items()):
            self._objects = dataclasses.replace(
                self._objects, urls=tuple((known | dict(urls)).items())
            )
            self._storage = make_storage(objects=self._objects)
            self._views.clear()

    def check_allowed(self, location: str) -> None:
        """Raises: ConfigError if nothing below the node's prefixes is asked for."""
        if reason := self._options.find_refusal(location):
            raise ConfigError(
                f"{location}: {reason}\n"
                "add what may be fetched to `prefixes` of `mirror` on this node, which has "
                f"{', '.join(self._options.prefixes)}"
            )

    async def ask(self, question: Callable[[Storage], T]) -> T:
        """What a question about the source's storage returns, asked in a thread."""
        return await self._call(lambda: question(self._storage))

    async def stat(self, location: str) -> FileStat:
        """The state of a file now. Raises: as Storage.stat does; ConfigError if it is not
        allowed."""
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
        """A view of the storage whose reads are of this version, opened once."""
        opening = self._views.get(key)
        if opening is None or (opening.done() and not _is_well(opening)):
            opening = asyncio.ensure_future(self._open_view(key))
            self._views[key] = opening
            if len(self._views) > _MAX_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(key)
        return await asyncio.shield(opening)

    async def _open_view(self, key: FileKey) -> Storage:
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
    """The states of source files, as they were last seen; the engine's folder remembers them."""

    engine: Engine
    source: SourceReader
    _asking: dict[str, asyncio.Task[FileStat]] = field(default_factory=dict)

    async def get(self, location: str) -> FileStat:
        """The state of a file, not older than FRESH_SECONDS if the source answers.

        Raises: as Storage.stat does.
        """
        known = await self.engine.call(self.engine.store.get_state, location)
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
                "mirror: the source of %s does not answer; assuming that it has not changed",
                location,
            )
            return FileStat(size=known[0], etag=known[1])

    async def _ask(self, location: str) -> FileStat:
        state = await self.source.stat(location)
        await self.note(location, state)
        return state

    async def note(self, location: str, state: FileStat) -> None:
        """A file has this state now. Raises: ConfigError if it is not one that may be read."""
        self.source.check_allowed(location)
        await self.engine.call(
            self.engine.store.put_state, location, state.size, state.etag, time.time()
        )


def _is_well(task: asyncio.Future[Storage]) -> bool:
    return not task.cancelled() and task.exception() is None


def make_key(location: str, state: FileStat) -> FileKey:
    """The name of a version in a mirror. A mounted file is known by its size and time of
    modification: two mounts of it have other devices, perhaps other inodes."""
    etag = state.etag if find_scheme(location) else state.etag.partition("-")[0]
    return FileKey(location, etag, state.size)


def _allocate(size: int) -> Bytes:
    return np.empty(size, np.uint8)
