"""The head and the tail of a file, which are its first and its last bytes. A storage may read them
along with the size and the identity of the file.

Code that indexes a file first reads the head and the tail, which say where everything else is. Over
a network, this takes no additional round trip if they are requested together with the size, before
the size is known.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol, TypeGuard

from megablend.storage.base import Storage

HEAD_BYTES = 4 << 10
"""The number of bytes that are read from a file's head."""
TAIL_BYTES = 64 << 10
"""The number of bytes that are read from a file's tail. Most footers fit into it."""
_MIN_BYTES = 2 << 10
"""The minimum size to which heads and tails are shortened to make room for those of other files."""


class HeadAndTail(NamedTuple):
    """The first and the last bytes of a file. They may overlap."""

    size: int
    """The size of the file in bytes."""
    head: bytes
    tail: bytes
    """The last bytes of the file; empty if the size was not known when they were requested, and the
    server does not support requests for the end of a file."""

    @property
    def tail_start(self) -> int:
        """The offset in the file of the first byte of `tail`."""
        return self.size - len(self.tail)

    @property
    def num_bytes(self) -> int:
        """The total number of bytes of the head and the tail."""
        return len(self.head) + len(self.tail)

    def shorten(self, max_bytes: int) -> HeadAndTail:
        """Return the same head and tail, each cut to at most `max_bytes`."""
        return HeadAndTail(self.size, self.head[:max_bytes], self.tail[-max_bytes:])


class HeadAndTailStorage(Storage, Protocol):
    """A storage that reads the head and the tail of a file along with its size and identity."""

    def get_ends(self, path: str) -> HeadAndTail | None:
        """Return the known head and tail of a file, in the version that is read; None if they are
        not known. Sends no requests."""
        ...

    def read_ends(self, path: str) -> None:
        """Read the head and the tail of a file in one round of requests. If the size and the
        identity of the file are not known, they are requested too. Does nothing if head and tail
        are known.

        Raises: the same errors as Storage.read.
        """
        ...


class KeptHeadsAndTails:
    """A cache of the heads and tails of files, by path, with a memory limit. Thread-safe."""

    max_bytes = 32 << 20
    """The limit in bytes for all files together. The more files there are, the less is kept of
    each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends = dict[str, HeadAndTail]()
        self._bytes = 0
        self._max_end_bytes = TAIL_BYTES
        """The maximum number of bytes that are kept of each head and of each tail."""
        self._is_full = False
        """Whether there was no room for the head and tail that were last passed to `put`."""

    @property
    def tail_bytes(self) -> int:
        """The number of bytes to read from the end of a file; 0 if they would not be kept."""
        return 0 if self._is_full else self._max_end_bytes

    def get(self, path: str) -> HeadAndTail | None:
        """Return the head and tail of a file; None if they are not kept."""
        return self._ends.get(path)

    def put(self, path: str, ends: HeadAndTail) -> None:
        """Keep the head and tail of a file, if there is room."""
        self.remove(path)
        with self._lock:
            while (
                self._bytes + ends.shorten(self._max_end_bytes).num_bytes > self.max_bytes
                and self._max_end_bytes > _MIN_BYTES
            ):
                self._max_end_bytes //= 2
                self._ends = {
                    other: kept.shorten(self._max_end_bytes) for other, kept in self._ends.items()
                }
                self._bytes = sum(kept.num_bytes for kept in self._ends.values())
            ends = ends.shorten(self._max_end_bytes)
            self._is_full = self._bytes + ends.num_bytes > self.max_bytes
            if not self._is_full:
                self._ends[path] = ends
                self._bytes += ends.num_bytes

    def remove(self, path: str) -> None:
        """Remove the head and tail of a file that has changed."""
        if path in self._ends:
            with self._lock:
                ends = self._ends.pop(path, None)
                if ends is not None:
                    self._bytes -= ends.num_bytes


def keeps_ends(storage: Storage) -> TypeGuard[HeadAndTailStorage]:
    """Return whether a storage is a HeadAndTailStorage."""
    return hasattr(storage, "get_ends")


def get_ends(storage: Storage, path: str) -> HeadAndTail | None:
    """See HeadAndTailStorage.get_ends; None for any other storage."""
    return storage.get_ends(path) if keeps_ends(storage) else None


def read_ends(storage: Storage, path: str) -> None:
    """See HeadAndTailStorage.read_ends; any other storage reads nothing."""
    if keeps_ends(storage):
        storage.read_ends(path)
