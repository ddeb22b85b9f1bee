"""The beginning and the end of a file, which a storage may read along with the file's state: they
say where everything else is.

Code that indexes a file begins with these. Over a network they take no round of
requests of their own if they are requested together with the state, at a time when the
size of the file is not known yet.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol, TypeGuard

from megablend.storage.base import Storage

HEAD_BYTES = 4 << 10
TAIL_BYTES = 64 << 10
"""Most footers fit into these."""
_MIN_BYTES = 2 << 10
"""Ends are not shortened below this to make room for those of further files."""


class HeadAndTail(NamedTuple):
    """The beginning and the end of a file; they may overlap."""

    size: int
    """Bytes of the file."""
    head: bytes
    tail: bytes
    """The file's last bytes; empty if the size was not known when they were requested, and the
    server does not answer such requests."""

    @property
    def tail_start(self) -> int:
        """The first byte of `tail` in the file."""
        return self.size - len(self.tail)

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return len(self.head) + len(self.tail)

    def shorten(self, max_bytes: int) -> HeadAndTail:
        """Cut each of the two to at most `max_bytes`."""
        return HeadAndTail(self.size, self.head[:max_bytes], self.tail[-max_bytes:])


class HeadAndTailStorage(Storage, Protocol):
    """A storage that reads the ends of files along with their state."""

    def get_ends(self, path: str) -> HeadAndTail | None:
        """What is known of a file's ends, in the version that reads use;
        None if nothing is known. Requests nothing."""
        ...

    def read_ends(self, path: str) -> None:
        """Read a file's ends, and its state if that is not known, in one round of requests; nothing
        if they are known.

        Raises: as Storage.read does.
        """
        ...


class KeptHeadsAndTails:
    """HeadAndTail of files by path, within a limit of memory. Safe between threads."""

    max_bytes = 32 << 20
    """Limit for all of them: with more files, less of each is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends = dict[str, HeadAndTail]()
        self._bytes = 0
        self._max_each = TAIL_BYTES
        """Bytes that are kept of each head and of each tail."""
        self._is_full = False

    @property
    def tail_bytes(self) -> int:
        """Bytes of a file's end that it is worth reading; 0 if they would not be kept."""
        return 0 if self._is_full else self._max_each

    def get(self, path: str) -> HeadAndTail | None:
        """Return the ends of a file, if they are kept."""
        return self._ends.get(path)

    def put(self, path: str, ends: HeadAndTail) -> None:
        """Keep the ends of a file, if there is room."""
        self.remove(path)
        with self._lock:
            while (
                self._bytes + ends.shorten(self._max_each).num_bytes > self.max_bytes
                and self._max_each > _MIN_BYTES
            ):
                self._max_each //= 2
                self._ends = {
                    each: kept.shorten(self._max_each) for each, kept in self._ends.items()
                }
                self._bytes = sum(each.num_bytes for each in self._ends.values())
            ends = ends.shorten(self._max_each)
            self._is_full = self._bytes + ends.num_bytes > self.max_bytes
            if not self._is_full:
                self._ends[path] = ends
                self._bytes += ends.num_bytes

    def remove(self, path: str) -> None:
        """Forget the ends of a file, which has another version now."""
        if path in self._ends:
            with self._lock:
                ends = self._ends.pop(path, None)
                if ends is not None:
                    self._bytes -= ends.num_bytes


def keeps_ends(storage: Storage) -> TypeGuard[HeadAndTailStorage]:
    """Return whether a storage is a HeadAndTailStorage."""
    return hasattr(storage, "get_ends")


def get_ends(storage: Storage, path: str) -> HeadAndTail | None:
    """See HeadAndTailStorage.get_ends; None from any other storage."""
    return storage.get_ends(path) if keeps_ends(storage) else None


def read_ends(storage: Storage, path: str) -> None:
    """See HeadAndTailStorage.read_ends; any other storage reads nothing."""
    if keeps_ends(storage):
        storage.read_ends(path)
