"""A storage that reads remote files through the mirror on this node's disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import ConfigError, DataError, MegablendError, MissingFileError, ResourceError
from megablend.mirror.disk.folder import FileKey, MirrorFolder
from megablend.mirror.disk.mirrored_file import MirroredFile
from megablend.mirror.disk.pages import pages_of_ranges, rows_of_ranges
from megablend.mirror.disk.room import Need
from megablend.mirror.node.frames import ORIGINS
from megablend.mirror.node.source_reads import make_key
from megablend.mirror.rank.connection import Connection, find_connection
from megablend.mirror.rank.opening import NodeLostError
from megablend.storage.base import Allocate, Bytes, FileStat, ReadLimits, Storage, allocate_bytes
from megablend.storage.find import Found
from megablend.storage.futures import call_now, fail_now, forward_result
from megablend.storage.head_and_tail import HEAD_BYTES, TAIL_BYTES, HeadAndTail
from megablend.storage.hints import DueRanges, Filled
from megablend.storage.local import LIMITS, ends_early, replaced_error
from megablend.storage.mirror_options import MirrorOptions
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.urls import split_query
from megablend.storage.process_counts import count
from megablend.storage.waits import wait_for
from megablend.storage.wrapper import WrapperStorage
from megablend.system.limited_log import LimitedLog

T = TypeVar("T")
_MAX_REQUESTS = 8
"""The maximum number of times that a read requests its pages, which may be evicted before it reads
them."""
_NUM_THREADS = 16
_LOG = LimitedLog()
"""Logs a warning about each mirror at most once a minute."""


@dataclass(slots=True)
class _Opened:
    """A version of a file that is being read, and the mirror's copy of it, if there is one."""

    state: FileStat
    key: FileKey
    copy: MirroredFile | None = None
    is_complete: bool = False

    def read(
        self, offsets: Int64s, sizes: Int64s, allocate: Allocate, num_fetched: int = 0
    ) -> tuple[Bytes, Int64s] | None:
        """Read ranges from the copy, as `Storage.read_ranges` does. Returns: None if not all of
        them are held.

        Args:
            num_fetched: the number of bytes that the node process has just fetched for this read.
                They are not counted as bytes from the mirror.
        """
        copy = self.copy
        if copy is None or offsets.min(initial=0) < 0 or sizes.min(initial=0) < 0:
            return None
        ends = sizes.cumsum()
        begins = ends - sizes
        out = allocate(int(ends[-1]) if len(ends) else 0)
        if copy.read_into(offsets, sizes, begins, out):
            count("mirror_bytes", max(0, len(out) - num_fetched))
            return out, begins
        self.is_complete = False
        return None

    def find_copy(self, folder: str) -> None:
        """Open the mirror's copy, if there is one by now, and determine whether it is complete."""
        if self.copy is None or not self.copy.is_current:
            # If the folder was removed, the node process creates it again, or reports why it cannot
            with suppress(ConfigError, MissingFileError):
                self.copy = MirroredFile.open(MirrorFolder.attach(folder), self.key)
        self.is_complete = self.copy is not None and self.copy.is_complete


class MirrorStorage(WrapperStorage):
    """A storage that reads files below the mirror's prefixes from this node's mirror. The node
    process fetches pages that are not held. If it does not respond, or has no room for the pages,
    they are read from `inner`.

    Args:
        inner: the storage that reads the sources.
        options: the settings of the mirror.
        objects: the settings of object stores, for the node process.
        checking: whether each call of `stat` asks the node process for the present state of a file.
    """

    def __init__(
        self,
        inner: Storage,
        options: MirrorOptions,
        objects: ObjectOptions,
        checking: bool = False,
    ) -> None:
        super().__init__(inner)
        self._options = options
        self._objects = objects
        self._checking = checking
        self._opened: dict[str, _Opened] = {}

    def __reduce__(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        return MirrorStorage, (self.inner, self._options, self._objects, self._checking)

    def for_checking(self) -> Storage:
        """See Storage.for_checking. The returned storage requests states from the node process."""
        return MirrorStorage(self.inner.for_checking(), self._options, self._objects, checking=True)

    def for_reading(self) -> Storage:
        """See Storage.for_reading."""
        inner = self.inner.for_reading()
        return MirrorStorage(inner, self._options, self._objects, self._checking)

    def limits(self, path: str) -> ReadLimits:
        """See Storage.limits. A file that is held completely has the limits of a local disk."""
        opened = self._opened.get(path)
        if opened is not None and opened.is_complete:
            return LIMITS
        return self.inner.limits(path)

    def find(self, pattern: str) -> Found:
        """See Storage.find. The source is listed, not the mirror."""
        listing = self.inner.find(pattern)
        paths = [match.path for match in listing.files if self._options.covers(match.path)]
        for path in paths:
            self._opened.pop(path, None)
            self._pin(path, self.inner.stat(path))
        if paths:
            # The listing may have newer versions than the node process knows
            states = [(split_query(path)[0], self._opened[path].state) for path in paths]
            try:
                self.connection.report_states(states)
            except NodeLostError as error:
                self.warn(error)
        return listing

    def stat(self, path: str) -> FileStat:
        """See Storage.stat."""
        if not self._options.covers(path):
            return self.inner.stat(path)
        if self._checking:
            self._opened.pop(path, None)
        return self._open(path).state

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened."""
        return (
            self._open(path).state if self._options.covers(path) else self.inner.stat_opened(path)
        )

    def get_ends(self, path: str) -> HeadAndTail | None:
        """See HeadAndTailStorage.get_ends. Ends of mirrored files are kept only in the mirror."""
        return None if self._options.covers(path) else super().get_ends(path)

    def read_ends(self, path: str) -> None:
        """See HeadAndTailStorage.read_ends. The ends of mirrored files are read into the mirror."""
        if not self._options.covers(path):
            super().read_ends(path)
            return
        size = self._open(path).key.size
        head = min(HEAD_BYTES, size)
        tail = min(TAIL_BYTES, size)
        self.read_ranges(path, np.array([0, size - tail]), np.array([head, tail]), allocate_bytes)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        if not self._options.covers(path):
            return self.inner.read(path, offset, size)
        out, _ = self.read_ranges(path, np.array([offset]), np.array([size]), allocate_bytes)
        return out.tobytes()

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        held = self._read_held(path, offsets, sizes, allocate)
        return held or wait_for(self._fetch(path, offsets, sizes, allocate))

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch. The future is done at once if all pages are held."""
        held = self._read_held(path, offsets, sizes, allocate)
        if held is None:
            return self._fetch(path, offsets, sizes, allocate)
        return call_now(lambda: held)

    def _read_held(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s] | None:
        """Read ranges of a file that was opened before. Returns: None if not all are held."""
        opened = self._opened.get(path)
        return None if opened is None else opened.read(offsets, sizes, allocate)

    def _fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """Request ranges that are not held, and read them: see `fetch`."""
        if not self._options.covers(path):
            return self.inner.fetch(path, offsets, sizes, allocate)
        try:
            opened = self._open(path)
            size = opened.key.size
            outside = np.flatnonzero((offsets < 0) | (sizes < 0) | (offsets > size - sizes))
            if len(outside):
                i = outside[0]
                raise ends_early(path, int(offsets[i]), int(sizes[i]), size)
        except MegablendError as error:
            return fail_now(error)
        read = _Read(self, path, opened, offsets, sizes, allocate)
        read.run()
        return read.result

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """See Storage.descriptor. Mirrored files have no descriptor, since a kernel that reads
        through it would not notice that pages are evicted."""
        return nullcontext(-1) if self._options.covers(path) else self.inner.descriptor(path)

    def distrust(self, path: str, offsets: Int64s, sizes: Int64s) -> None:
        """See HintedStorage.distrust."""
        if self._options.covers(path):
            opened = self._open(path)
            need = Need.of(opened.key, pages_of_ranges(offsets, sizes), time.monotonic())
            try:
                self.connection.distrust(need)
            except NodeLostError as error:
                self.warn(error)

    def set_due(self, reader: str, ranges: Sequence[DueRanges]) -> None:
        """See HintedStorage.set_due."""
        try:
            self.connection.set_due(reader, self._list_needs(ranges))
        except NodeLostError as error:
            self.warn(error)

    def fill(self, ranges: Sequence[DueRanges], *, is_dry: bool) -> Filled:
        """See HintedStorage.fill. Raises: ResourceError if no node process responds."""
        try:
            return self.connection.fill(self._list_needs(ranges), is_dry=is_dry)
        except NodeLostError as error:
            raise ResourceError(
                f"{self.folder}: no node process is responding: {error}\ncheck node.log in that folder, and try again"
            ) from None

    def _list_needs(self, ranges: Sequence[DueRanges]) -> list[Need]:
        """Return the needs of ranges in files that are mirrored. Raises: see `_open_all`."""
        mirrored = [of_file for of_file in ranges if self._options.covers(of_file.path)]
        self._open_all([of_file.path for of_file in mirrored])
        now = time.monotonic()
        needs: list[Need] = []
        for of_file in mirrored:
            range_of_row, pages = rows_of_ranges(of_file.offsets, of_file.sizes)
            due = now + of_file.due[range_of_row]
            needs.append(Need(self._open(of_file.path).key, pages, due))
        return needs

    @property
    def folder(self) -> str:
        """The path of the mirror's folder."""
        return self._options.folder

    @property
    def connection(self) -> Connection:
        """This process's connection to the node process."""
        return find_connection(self._options, self._objects)

    def _open_all(self, paths: Sequence[str]) -> None:
        """Determine which versions of files to read, with one request for all files. Raises:
        NodeLostError; the same errors as Storage.stat."""
        unknown = sorted({path for path in paths if path not in self._opened})
        states = self.connection.stat([split_query(path)[0] for path in unknown]) if unknown else []
        for path, state in zip(unknown, states, strict=True):
            self._pin(path, state)

    def _open(self, path: str) -> _Opened:
        """Return the version of a file that is read. Raises: the same errors as Storage.stat."""
        if path not in self._opened:
            try:
                self._open_all([path])
            except NodeLostError as error:
                self.warn(error)
                self._pin(path, self.inner.stat(path))
        return self._opened[path]

    def _pin(self, path: str, state: FileStat) -> None:
        self._opened.setdefault(path, _Opened(state, make_key(split_query(path)[0], state)))

    def warn(self, error: BaseException) -> None:
        """Log a warning that the source is read without the mirror. At most one warning a minute is
        logged."""
        _LOG.warn(self.folder, f"reading the source without the mirror: {error}")


@dataclass(slots=True)
class _Read:
    """A call of `fetch` in progress. It requests pages and then reads them. If some were evicted in
    between, it does both again."""

    storage: MirrorStorage
    path: str
    opened: _Opened
    offsets: Int64s
    sizes: Int64s
    allocate: Allocate
    num_requests: int = 0
    num_fetched: int = 0
    """The number of bytes that the node process has fetched for this call."""
    result: Future[tuple[Bytes, Int64s]] = field(default_factory=Future)

    def run(self) -> None:
        """Read the ranges if all their pages are held. Otherwise request the pages, and read when
        they are held."""
        if self.result.done():  # `_start` failed, but a thread has taken the work nevertheless
            return
        held = None
        copy = self.opened.copy
        try:
            # Otherwise the copy has just been read, and does not hold all pages
            if self.num_requests or copy is None or not copy.is_current:
                self.opened.find_copy(self.storage.folder)
                held = self.opened.read(self.offsets, self.sizes, self.allocate, self.num_fetched)
            if held is None:
                self._request_pages()
            elif self.result.set_running_or_notify_cancel():
                self.result.set_result(held)
        except Exception as error:
            self._fail(error)

    def _request_pages(self) -> None:
        self.num_requests += 1
        if self.num_requests > _MAX_REQUESTS:
            raise ResourceError(
                f"{self.storage.folder}: pages are evicted before they are read; raise `mirror.size`"
            )
        need = Need.of(self.opened.key, pages_of_ranges(self.offsets, self.sizes), time.monotonic())
        self.storage.connection.want(need).add_done_callback(self._continue)

    def _continue(self, request: Future[bytes]) -> None:
        error = request.exception()
        if error is None:
            source, peers = ORIGINS.unpack(request.result())
            count("source_bytes", source)
            count("peer_bytes", peers)
            self.num_fetched += source + peers
            self.run()
        elif isinstance(error, NodeLostError) and self.num_requests < _MAX_REQUESTS:
            # In another thread, since connecting again may take a while, and this thread receives
            # other responses
            self._start(self.run)
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        is_disk = isinstance(error, DataError) and error.path.startswith(self.storage.folder)
        if is_disk or isinstance(error, NodeLostError | ResourceError):
            self.storage.warn(error)
            reading = self._start(self._read_source)
            if reading is not None:
                forward_result(reading, self.result)
        elif self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)

    def _start(self, work: Callable[[], T]) -> Future[T] | None:
        """Call `work` in another thread. If the process is ending, in which no thread can be
        started any more, end the read with that error, and return None."""
        try:
            return _threads(os.getpid()).submit(work)
        except RuntimeError as error:
            self._fail(error)
            return None

    def _read_source(self) -> tuple[Bytes, Int64s]:
        """Read the ranges from the source. Raises: the same errors as Storage.read; DataError if
        the source has another version of the file."""
        inner = self.storage.inner
        out, begins = inner.read_ranges(self.path, self.offsets, self.sizes, self.allocate)
        state = inner.stat_opened(self.path)
        if make_key(self.opened.key.location, state) != self.opened.key:
            raise replaced_error(self.path)
        count("direct_bytes", len(out))
        return out, begins


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the thread pool of the process with this id, for reads that may wait. A forked child
    needs its own pool."""
    return ThreadPoolExecutor(_NUM_THREADS, "megablend-mirror")
