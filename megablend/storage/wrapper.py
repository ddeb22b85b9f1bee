"""Storages that pass calls on to other storages: `RoutingStorage` chooses among several;
`WrapperStorage` wraps one, and is the base class of caches and meters."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from copy import copy

from megablend.arrays import Int64s
from megablend.storage.base import Allocate, Bytes, FileStat, KnownFiles, ReadLimits, Storage
from megablend.storage.find import Found
from megablend.storage.futures import call_now
from megablend.storage.head_and_tail import HeadAndTail, get_ends, read_ends


class RoutingStorage:
    """A storage that passes each call about a location on to the storage that `route` chooses."""

    __slots__ = ()

    def route(self, location: str) -> Storage:
        """Return the storage that serves a location."""
        raise NotImplementedError

    def limits(self, path: str) -> ReadLimits:
        """See Storage.limits."""
        return self.route(path).limits(path)

    def find(self, pattern: str) -> Found:
        """See Storage.find."""
        return self.route(pattern).find(pattern)

    def glob(self, pattern: str) -> list[str]:
        """See Storage.glob."""
        return self.route(pattern).glob(pattern)

    def is_folder(self, path: str) -> bool:
        """See Storage.is_folder."""
        return self.route(path).is_folder(path)

    def is_readable(self, path: str) -> bool:
        """See Storage.is_readable."""
        return self.route(path).is_readable(path)

    def stat(self, path: str) -> FileStat:
        """See Storage.stat."""
        return self.route(path).stat(path)

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened."""
        return self.route(path).stat_opened(path)

    def get_ends(self, path: str) -> HeadAndTail | None:
        """See HeadAndTailStorage.get_ends."""
        return get_ends(self.route(path), path)

    def read_ends(self, path: str) -> None:
        """See HeadAndTailStorage.read_ends."""
        read_ends(self.route(path), path)

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        return self.route(path).read(path, offset, size)

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        return self.route(path).read_ranges(path, offsets, sizes, allocate)

    def fetch(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> Future[tuple[Bytes, Int64s]]:
        """See Storage.fetch. If a subclass overrides only `read_ranges`, the ranges are read by
        that method."""
        if type(self).read_ranges is RoutingStorage.read_ranges:
            return self.route(path).fetch(path, offsets, sizes, allocate)
        return call_now(self.read_ranges, path, offsets, sizes, allocate)

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """See Storage.descriptor."""
        return self.route(path).descriptor(path)


class WrapperStorage(RoutingStorage):
    """A storage that passes every call on to `inner`. Picklable if `inner` and the attributes of a
    subclass are.

    A subclass that must see all reads also overrides `descriptor` to return -1: kernels read
    directly through descriptors. A subclass that keeps bytes of files overrides `for_reading`, so
    that its views do not share these bytes.
    """

    # `inner` is a slot so that views may share all other attributes
    __slots__ = ("__dict__", "__weakref__", "inner")

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    def route(self, location: str) -> Storage:
        """See RoutingStorage.route."""
        return self.inner

    def for_checking(self) -> Storage:
        """Return `inner.for_checking()`, without this wrapper."""
        return self.inner.for_checking()

    def for_reading(self) -> Storage:
        """See Storage.for_reading. The view has its own `inner`, but shares all other attributes
        with this object, so that both have the same counts."""
        view = copy(self)
        view.__dict__ = self.__dict__
        view.inner = self.inner.for_reading()
        return view

    def known_files(self) -> KnownFiles:
        """See Storage.known_files."""
        return self.inner.known_files()

    def add_known_files(self, known: KnownFiles) -> None:
        """See Storage.add_known_files."""
        self.inner.add_known_files(known)
