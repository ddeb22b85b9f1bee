"""Reads pages of files from their sources, for a node process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    ConfigError,
)
from megablend.mirror.disk.folder import FileKey
from megablend.mirror.disk.pages import intersect, ranges_of_pages
from megablend.mirror.node.engine import Keep, Origins, Want, is_soon
from megablend.storage.base import FileStat, Storage, allocate_bytes
from megablend.storage.by_scheme import make_storage
from megablend.storage.local import modification_time
from megablend.storage.location import find_scheme
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.object_options import ObjectOptions

T = TypeVar("T")
MAX_PORTIONS = 64
"""The maximum number of portions that are read at a time. It applies separately to portions that
are due soon, and to all others."""
_MAX_CALLS = 256
"""The maximum number of blocking calls at a time. It is large, so that a silent server does not
delay the others."""
_MAX_VIEWS = 4096
"""The maximum number of versions of files that are kept open for reading."""


class SourceReader:
    """A reader of pages from object stores, web servers and mounted folders.

    Args:
        options: the settings of the mirror. Their `prefixes` determine which files may be read.
        objects: the settings of object stores.
    """

    def __init__(self, options: MirrorOptions, objects: ObjectOptions) -> None:
        self._options = options
        unhedged = tuple((prefix, (("hedges", False),)) for prefix in options.prefixes)
        self._objects = dataclasses.replace(
            objects, mirror=None, by_prefix=(*objects.by_prefix, *unhedged)
        )
        self._storage = make_storage(objects=self._objects)
        self._views = OrderedDict[FileKey, asyncio.Future[Storage]]()
        # Two semaphores, so that urgent reads do not wait for pages that are fetched ahead
        self._turns = asyncio.Semaphore(MAX_PORTIONS)
        self._soon_turns = asyncio.Semaphore(MAX_PORTIONS)
        self._threads = ThreadPoolExecutor(_MAX_CALLS, "megablend-source")
        self._reading: dict[asyncio.Future[None], Want] = {}
        """The reads in progress. Each key is a future that is done when the read has finished."""
        self.num_bytes = 0
        """The number of bytes that were read since the start."""
        self.requests = defaultdict[str, Counter[str]](Counter)
        """The number of reads, by the scheme of the location and by the result ("ok" or
        "failed")."""

    def add_queries(self, urls: Mapping[str, str]) -> None:
        """Send query strings with requests from now on. They may contain signatures, so they are
        kept only in memory.

        Args:
            urls: the query string of each URL. The URLs are given without it.
        """
        before = dict(self._objects.urls)
        queries = before | dict(urls)
        if queries != before:
            self._objects = dataclasses.replace(self._objects, urls=tuple(queries.items()))
            self._storage = make_storage(objects=self._objects)
            self._views.clear()

    def check_allowed(self, location: str) -> None:
        """Check that a location is below the prefixes of this node. Raises: ConfigError."""
        if refusal := self._options.find_refusal(location):
            raise ConfigError(f"{location}: {refusal}")

    async def ask(self, question: Callable[[Storage], T]) -> T:
        """Call a function with the storage of the sources in a thread, and return its result."""
        return await self._call(lambda: question(self._storage))

    async def stat(self, location: str) -> FileStat:
        """Request the state of a file from the source. Raises: the same errors as Storage.stat;
        ConfigError if this node may not read the file."""
        self.check_allowed(location)
        return await self._call(lambda: self._storage.for_checking().stat(location))

    async def read(self, want: Want, keep: Keep) -> None:
        """See PageReader.read. Also raises ChangedFileError if the file was replaced."""
        key = want.key
        self.check_allowed(key.location)
        offsets, sizes = ranges_of_pages(want.pages, key.size)
        status = "failed"
        finished = asyncio.get_running_loop().create_future()
        self._reading[finished] = want
        try:
            async with self._soon_turns if is_soon(want.due) else self._turns:
                view = await self._open(key)
                if view.limits(key.location).is_synchronous:
                    out, _ = await self._call(
                        lambda: view.read_ranges(key.location, offsets, sizes, allocate_bytes)
                    )
                else:
                    out, _ = await asyncio.wrap_future(
                        view.fetch(key.location, offsets, sizes, allocate_bytes)
                    )
            status = "ok"
            self.num_bytes += len(out)
            await keep(want.pages, out.data, Origins(source=len(out)))
        finally:
            self.requests[find_scheme(key.location) or "file"][status] += 1
            del self._reading[finished]
            finished.set_result(None)

    async def settle(self, want: Want) -> None:
        """Wait until this node has finished its present reads of the given pages. Another node
        requests this before it reads the pages itself."""
        concerned = [
            finished
            for finished, other in self._reading.items()
            if other.key == want.key and intersect(other.pages, want.pages)
        ]
        if concerned:
            await asyncio.wait(concerned)

    async def _open(self, key: FileKey) -> Storage:
        """Return a view of the storage that reads this version of the file. It is opened on the
        first call, and kept."""
        opening = self._views.get(key)
        has_failed = (
            opening is not None
            and opening.done()
            and (opening.cancelled() or opening.exception() is not None)
        )
        if opening is None or has_failed:
            opening = asyncio.ensure_future(self._open_view(key))
            self._views[key] = opening
            if len(self._views) > _MAX_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(key)
        return await asyncio.shield(opening)

    async def _open_view(self, key: FileKey) -> Storage:
        """Open a view of the storage for `_open`. Raises: ChangedFileError if the source has
        another version of the file now."""
        view = self._storage.for_reading()
        current = make_key(key.location, await self._call(lambda: view.stat(key.location)))
        if current != key:
            raise ChangedFileError(
                key.location,
                f"was replaced (found {current.size} bytes, etag {current.etag}; expected {key.size} bytes, "
                f"etag {key.etag}); {CHANGED_REMEDY}",
            )
        return view

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def make_key(location: str, state: FileStat) -> FileKey:
    """Make the key of a version of a file."""
    etag = state.etag if find_scheme(location) else modification_time(state.etag)
    return FileKey(location, etag, state.size)
