"""Hints to a storage that keeps copies: which bytes will be needed and when, and which are
wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

from megablend.arrays import Float64s, Int64s
from megablend.storage.base import Storage


class DueRanges(NamedTuple):
    """Ranges of a file that will be read."""

    path: str
    offsets: Int64s
    """Offsets of the ranges: int64 [n], bytes."""
    sizes: Int64s
    """Sizes of the ranges: int64 [n], bytes."""
    due: Float64s
    """Times at which the ranges will be read: float64 [n], seconds from now."""


class Filled(NamedTuple):
    """The numbers of bytes that were fetched beforehand."""

    needed: int = 0
    """Bytes of the named ranges that this node should hold."""
    missing: int = 0
    """Bytes of `needed` that this node did not hold."""
    refused: int = 0
    """Bytes of `missing` that there was no room for."""
    source: int = 0
    """Bytes fetched from the source."""
    peers: int = 0
    """Bytes fetched from other nodes."""

    def plus(self, other: Filled) -> Filled:
        """Return the sum of both, field by field."""
        return Filled(*(a + b for a, b in zip(self, other, strict=True)))


class HintedStorage(Storage, Protocol):
    """A storage that keeps copies of what it has read."""

    def set_due(self, reader: str, ranges: Sequence[DueRanges]) -> None:
        """Announce the ranges that a reader of this process will read, in place of those announced
        for it before. Without ranges, the reader will read nothing more. Raises: the same errors as
        Storage.stat."""
        ...

    def fill(self, ranges: Sequence[DueRanges], *, is_dry: bool) -> Filled:
        """Fetch now the parts of ranges that this node should hold, regardless of when they are
        due.

        Args:
            is_dry: whether to only count the bytes, and fetch nothing.

        Raises: the same errors as Storage.read.
        """
        ...

    def distrust(self, path: str, offsets: Int64s, sizes: Int64s) -> None:
        """Report that the bytes of ranges are wrong: the next read gets them from another place.
        Raises: the same errors as Storage.read."""
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
    """See HintedStorage.distrust; any other storage ignores it."""
    if takes_hints(storage):
        storage.distrust(path, offsets, sizes)
