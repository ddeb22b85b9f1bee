"""A storage for programs that fork their DataLoader's workers: see `helper`."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

from megablend.arrays import Int64s
from megablend.storage.base import Allocate, Bytes, FileStat, KnownFiles, Storage, allocate_bytes
from megablend.storage.find import Found
from megablend.storage.head_and_tail import HeadAndTail
from megablend.storage.local import replaced_error
from megablend.storage.location import find_scheme
from megablend.storage.objects import loop
from megablend.storage.objects.helper import get_helper
from megablend.storage.objects.known_objects import KnownObjects, split_known
from megablend.storage.objects.rate_limiter import is_loader_worker
from megablend.storage.wrapper import WrapperStorage


class ForkSafeStorage(WrapperStorage):
    """A storage that reads object stores through a helper process, except in a DataLoader's
    workers, and in a process that already has a client.

    Args:
        inner: the storage that reads, either in the helper or in this process; picklable.
        checking: whether `inner` is used for checking, and therefore accepts new versions of files.
    """

    def __init__(self, inner: Storage, *, checking: bool = False) -> None:
        super().__init__(inner)
        self._checking = checking
        self._helper = _HelperStorage(inner, checking=checking)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ForkSafeStorage, checking=self._checking), (self.inner,)

    def route(self, location: str) -> Storage:
        """See RoutingStorage.route."""
        if self.inner.limits(location).max_files == 1:  # no object store
            return self.inner
        if not (is_loader_worker() or loop.is_used()):
            return self._helper
        self.inner.add_known_files(self._helper.get_known(location))
        return self.inner

    def for_checking(self) -> Storage:
        """See Storage.for_checking."""
        return ForkSafeStorage(self.inner.for_checking(), checking=True)

    def for_reading(self) -> Storage:
        """See Storage.for_reading."""
        return ForkSafeStorage(self.inner.for_reading(), checking=self._checking)

    def known_files(self) -> KnownFiles:
        """Return an empty dict: each rank of a job has its own helper, which requests the versions
        that it needs."""
        return {}

    def add_known_files(self, known: KnownFiles) -> None:
        """See Storage.add_known_files."""


class _HelperStorage(WrapperStorage):
    """A storage that calls `inner` in the helper process. It keeps the versions of files that were
    read, for the helper's next calls and for forked workers."""

    def __init__(self, inner: Storage, *, checking: bool) -> None:
        super().__init__(inner)
        self._checking = checking
        self._known = KnownObjects()

    def find(self, pattern: str) -> Found:
        """See Storage.find. The versions that are found replace earlier ones."""
        listing, known = get_helper().call(self.inner, {}, "find", pattern).result()
        self._keep(known, replaces=True)
        result: Found = listing
        return result

    def glob(self, pattern: str) -> list[str]:
        """See Storage.glob."""
        return [match.path for match in self.find(pattern).files]

    def is_folder(self, path: str) -> bool:
        """See Storage.is_folder."""
        return bool(self._call("is_folder", path))

    def stat(self, path: str) -> FileStat:
        """See Storage.stat."""
        return cast(FileStat, self._call("stat", path))

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened."""
        return cast(FileStat, self._call("stat_opened", path))

    def get_ends(self, path: str) -> HeadAndTail | None:
        """See HeadAndTailStorage.get_ends."""
        return self._known.get_ends(path)

    def read_ends(self, path: str) -> None:
        """See HeadAndTailStorage.read_ends."""
        if self._known.get_ends(path) is None:
            self._call("read_ends", path)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        return bytes(self._call("read", path, offset, size))

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        return self.fetch(path, offsets, sizes, allocate).result()

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch."""
        future = Future[tuple[Bytes, Int64s]]()

        def copy(done: Future[Any]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                (data, begins), known = done.result()
                self._keep(known)
                out = allocate(len(data))
                out[:] = data
                future.set_result((out, begins))
            except BaseException as error:  # raised where the bytes are awaited
                future.set_exception(error)

        self._start("read_ranges", path, offsets, sizes, allocate_bytes).add_done_callback(copy)
        return future

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """See Storage.descriptor."""
        return nullcontext(-1)

    def _call(self, method: str, path: str, *arguments: Any) -> Any:
        """Call a method of `inner` in the helper, and keep the versions that it has read."""
        result, known = self._start(method, path, *arguments).result()
        self._keep(known)
        return result

    def _start(self, method: str, path: str, *arguments: Any) -> Future[Any]:
        """Start a call in the helper, and return its future."""
        return get_helper().call(self.inner, self.get_known(path), method, path, *arguments)

    def get_known(self, path: str) -> KnownFiles:
        """Return the version of one file, in the form of Storage.known_files; an empty dict if it
        is not known."""
        version = self._known.get(path)
        return {} if version is None else {find_scheme(path): {path: version}}

    def _keep(self, known: KnownFiles, *, replaces: bool = False) -> None:
        """Keep the versions that a call has read. Raises: ChangedFileError if a concurrent call has
        read another version.

        Args:
            replaces: whether these versions replace earlier ones.
        """
        for files in known.values():
            for path, facts in files.items():
                version, ends = split_known(facts)
                if replaces or self._checking:
                    self._known.replace({path: version})
                kept = self._known.keep(path, version, ends)
                # Another call may have replaced the version meanwhile, which is no error then
                if kept != version and not (replaces or self._checking):
                    raise replaced_error(path)
