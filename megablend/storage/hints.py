"""What a storage that keeps copies may be told: which bytes are needed when, and which are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

from megablend.arrays import Float64s, Int64s
from megablend.storage.base import Storage


class DueRanges(NamedTuple):
    """Ranges of a file that will be read."""

    path: str
    offsets: Int64s
    """int64 [n], in bytes."""
    sizes: Int64s
    """int64 [n], in bytes."""
    due: Float64s
    """float64 [n], seconds from now."""


class Filled(NamedTuple):
    """What was fetched beforehand, in bytes."""

    needed: int = 0
    """Of what was named, and is this node's to hold."""
    missing: int = 0
    """Of these, what was not held."""
    refused: int = 0
    """Of these, what there was no room for."""
    source: int = 0
    """Fetched from the source."""
    peers: int = 0
    """Fetched from other nodes."""

    def plus(self, other: Filled) -> Filled:
        """Both together."""
        return Filled(*(a + b for a, b in zip(self, other, strict=True)))


class HintedStorage(Storage, Protocol):
    """A storage that keeps copies of what it has read."""

    def set_due(self, reader: str, ranges: Sequence[DueRanges]) -> None:
        """Tell what a reader of this process will read, instead of what was said of it before;
        nothing more if there are no ranges. Raises: as Storage.stat does."""
        ...

    def fill(self, ranges: Sequence[DueRanges], *, is_dry: bool) -> Filled:
        """Fetch ranges now, whenever they are due: all that this node is to hold of them.

        Args:
            is_dry: only say what that would be.

        Raises: as Storage.read does.
        """
        ...

    def distrust(self, path: str, offsets: Int64s, sizes: Int64s) -> None:
        """Tell that ranges differ from what they should be: they are got from somewhere else when
        they are read the next time. Raises: as Storage.read does."""
        ...


def takes_hints(storage: Storage, path: str | None = None) -> TypeGuard[HintedStorage]:
    """Whether a storage is a HintedStorage; with a path, whether it keeps copies of that."""
    route = getattr(storage, "route", None)
    if path is not None and route is not None and hasattr(storage, "set_due"):
        return takes_hints(route(path))
    return hasattr(storage, "set_due")


def distrust(storage: Storage, path: str, offsets: Int64s, sizes: Int64s) -> None:
    """See HintedStorage.distrust; nothing in any other storage."""
    if takes_hints(storage):
        storage.distrust(path, offsets, sizes)
