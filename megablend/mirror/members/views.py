"""Numbered views: which nodes a cluster has, as all of them agree."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol


class View(NamedTuple):
    """The nodes of a cluster until the next view is in force."""

    number: int
    """The higher one is the later one."""
    names: tuple[str, ...]
    """`host:port`, sorted."""
    earlier: tuple[tuple[str, ...], ...] = ()
    """The nodes of the last views, the latest first: they may be reading still what others do now."""


class Views(Protocol):
    """Tells which nodes there are, while they come and go."""

    size: int
    """Number of nodes that are expected."""

    def follow(self) -> AsyncIterator[View]:
        """Views that this node is in, each later than the one before. Raises: ConfigError."""
        ...
