"""A storage for tests, with local files at locations that only this storage can open."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from megablend.arrays import Int64s
from megablend.storage.base import Allocate, Bytes, FileStat, ReadLimits, Storage
from megablend.storage.find import Found, Match
from megablend.storage.wrapper import WrapperStorage

SCHEME = "moved:/"
"""The text that is put before a file's absolute path to make its location."""


class MovedStorage(WrapperStorage):
    """A storage that gives access to the file `/x` of another storage, `inner`, under the location
    `moved://x`. It has no descriptors, so everything is read by calls to the storage."""

    def limits(self, path: str) -> ReadLimits:
        """See Storage.limits."""
        return self.inner.limits(_path(path))

    def for_checking(self) -> Storage:
        """See Storage.for_checking."""
        return type(self)(self.inner.for_checking())

    def find(self, pattern: str) -> Found:
        """See Storage.find."""
        listing = self.inner.find(_path(pattern))
        files = [
            Match(match.links, f"{SCHEME}{match.path}", f"{SCHEME}{match.real}")
            for match in listing.files
        ]
        return Found(
            files, listing.unreadable, tuple(f"{SCHEME}{folder}" for folder in listing.folders)
        )

    def glob(self, pattern: str) -> list[str]:
        """See Storage.glob."""
        return [match.path for match in self.find(pattern).files]

    def is_folder(self, path: str) -> bool:
        """See Storage.is_folder."""
        return self.inner.is_folder(_path(path))

    def is_readable(self, path: str) -> bool:
        """See Storage.is_readable."""
        return self.inner.is_readable(_path(path))

    def stat(self, path: str) -> FileStat:
        """See Storage.stat."""
        return self.inner.stat(_path(path))

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened."""
        return self.inner.stat_opened(_path(path))

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See Storage.read."""
        return self.inner.read(_path(path), offset, size)

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """See Storage.read_ranges."""
        return self.inner.read_ranges(_path(path), offsets, sizes, allocate)

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """See Storage.descriptor."""
        return nullcontext(-1)


def _path(location: str) -> str:
    return location.removeprefix(SCHEME)
