"""A storage for programs that fork their DataLoader's workers: see `helper`."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from megablend.storage.base import Allocate, Bytes, FileStat, Int64s, KnownFiles, Storage
from megablend.storage.find import Found
from megablend.storage.objects import loop
from megablend.storage.objects.flow import is_loader_worker
from megablend.storage.objects.helper import get_helper
from megablend.storage.wrapper import WrapperStorage


class BeforeForkStorage(WrapperStorage):
    """Reads object stores through a helper process, except in a DataLoader's workers, and if this process has a client already.

    Args:
        inner: reads everything else; picklable.
    """

    def for_checking(self) -> Storage:
        """See Storage.for_checking."""
        return BeforeForkStorage(self.inner.for_checking())

    def find(self, pattern: str) -> Found:
        """See Storage.find."""
        if self._is_direct(pattern):
            return self.inner.find(pattern)
        found: Found = get_helper().call(self.inner, "find", pattern).result()
        return found

    def glob(self, pattern: str) -> list[str]:
        """See Storage.glob."""
        return (
            self.inner.glob(pattern) if self._is_direct(pattern) else [each.path for each in self.find(pattern).files]
        )

    def is_folder(self, path: str) -> bool:
        """See Storage.is_folder."""
        if self._is_direct(path):
            return self.inner.is_folder(path)
        return bool(get_helper().call(self.inner, "is_folder", path).result())

    def stat(self, path: str) -> FileStat:
        """See Storage.stat."""
        if self._is_direct(path):
            return self.inner.stat(path)
        found: FileStat = get_helper().call(self.inner, "stat", path).result()
        return found

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened."""
        if self._is_direct(path):
            return self.inner.stat_opened(path)
        found: FileStat = get_helper().call(self.inner, "stat_opened", path).result()
        return found

    def known_files(self) -> KnownFiles:
        """See Storage.known_files: the helper knows them, and each rank has its own."""
        return {}

    def add_known_files(self, known: KnownFiles) -> None:
        """See Storage.add_known_files."""

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        if self._is_direct(path):
            return self.inner.read(path, offset, size)
        return bytes(get_helper().call(self.inner, "read", path, offset, size).result())

    def read_ranges(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        if self._is_direct(path):
            return self.inner.read_ranges(path, offsets, sizes, allocate)
        return self.fetch(path, offsets, sizes, allocate).result()

    def fetch(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch."""
        if self._is_direct(path):
            return self.inner.fetch(path, offsets, sizes, allocate)
        found = Future[tuple[Bytes, Int64s]]()

        def copy(done: Future[tuple[Bytes, Int64s]]) -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                data, begins = done.result()
                out = allocate(len(data))
                out[:] = data
                found.set_result((out, begins))
            except BaseException as error:  # raised where the bytes are awaited
                found.set_exception(error)

        get_helper().call(self.inner, "read_ranges", path, offsets, sizes, allocate_bytes).add_done_callback(copy)
        return found

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """See Storage.descriptor."""
        return self.inner.descriptor(path) if self._is_direct(path) else nullcontext(-1)

    def _is_direct(self, path: str) -> bool:
        return self.inner.limits(path).max_files == 1 or is_loader_worker() or loop.is_used()


def allocate_bytes(size: int) -> Bytes:
    """Memory for ranges, in the helper."""
    return np.empty(size, np.uint8)
