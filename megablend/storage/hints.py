"""Hints to a storage that keeps copies of files: which bytes will be needed and when, and which
bytes of its copies are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

from megablend.arrays import Float64s, Int64s
from megablend.storage.base import Storage


class DueRanges(NamedTuple):
    """Ranges of a file that will be read, with the times at which they are due."""

    path: str
    offsets: Int64s
    """The offset of each range in bytes (int64 [n])."""
    sizes: Int64s
    """The size of each range in bytes (int64 [n])."""
    due: Float64s
    """The time at which each range will be read, in seconds from now (float64 [n])."""


class Filled(NamedTuple):
    """The numbers of bytes that `HintedStorage.fill` has fetched, or would have to fetch."""

    needed: int = 0
    """Bytes of the requested ranges that this node should hold."""
    missing: int = 0
    """Those bytes of `needed` that this node did not hold."""
    refused: int = 0
    """Those bytes of `missing` for which there was no room."""
    source: int = 0
    """Bytes fetched from the source."""
    peers: int = 0
    """Bytes fetched from other nodes."""

    def plus(self, other: Filled) -> Filled:
        """Return the sum of two results, field by field."""
        return Filled(*(a + b for a, b in zip(self, other, strict=True)))


class HintedStorage(Storage, Protocol):
    """A storage that keeps copies of the bytes that it has read, and accepts hints about them."""

    def set_due(self, reader: str, ranges: Sequence[DueRanges]) -> None:
        """Announce the ranges that a reader of this process will read. They replace earlier
        announcements for the same reader. Pass no ranges if the reader will read nothing more.
        Raises: the same errors as Storage.stat."""
        ...

    def fill(self, ranges: Sequence[DueRanges], *, is_dry: bool) -> Filled:
        """Fetch those parts of the given ranges that this node should hold, now instead of when
        they are due.

        Args:
            is_dry: whether to only count the bytes, and fetch nothing.

        Raises: the same errors as Storage.read.
        """
        ...

    def distrust(self, path: str, offsets: Int64s, sizes: Int64s) -> None:
        """Report that the bytes of the given ranges are wrong, so that the next read gets them from
        another place. Raises: the same errors as Storage.read."""
        ...


def takes_hints(storage: Storage, path: str | None = None) -> TypeGuard[HintedStorage]:
    """Return whether a storage is a HintedStorage; with a path, whether it keeps copies of that
    file."""
    if not hasattr(storage, "set_due"):
        return False
    route = getattr(storage, "route", None)
    if path is None or route is None:
        return True
    return takes_hints(route(path))


def distrust(storage: Storage, path: str, offsets: Int64s, sizes: Int64s) -> None:
    """See HintedStorage.distrust; any other storage ignores the report."""
    if takes_hints(storage):
        storage.distrust(path, offsets, sizes)
