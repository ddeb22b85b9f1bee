"""Numbered views: which nodes a cluster has, as all of them agree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, NamedTuple

MOST_EARLIER = 4


class View(NamedTuple):
    """The nodes of a cluster until the next view is in force."""

    number: int
    """The higher one is the later one."""
    names: tuple[str, ...]
    """`host:port`, sorted."""
    earlier: tuple[tuple[str, ...], ...] = ()
    """The nodes of the last views, the latest first: they may be reading still what others do now."""


class Views:
    """Tells which nodes there are, while they come and go."""

    size: int
    """Number of nodes that are expected."""
    find_away: Callable[[], Collection[str]] = staticmethod(lambda: ())
    """Nodes that do not answer this one."""

    async def start(self) -> None:
        """Be one of the nodes. Raises: ConfigError if that cannot be; ResourceError."""

    async def stop(self) -> None:
        """Tell no more."""

    def follow(self) -> AsyncIterator[View]:
        """Views that this node is in, each later than the one before. Raises: ConfigError."""
        raise NotImplementedError

    def find_doubt(self, number: int) -> float | None:
        """Since when others may have left this node out by a view that it has not heard of: monotonic
        seconds; infinite: they have; None: they have not.

        Args:
            number: of the view that is in force here.
        """
        return None

    def as_json(self) -> dict[str, Any]:
        """For people and metrics."""
        return {}


def propose(
    current: View | None, known: View | None, live: Collection[str], *, expected: int, keeps: bool
) -> View | None:
    """The view that is to be in place of the current one; None: it is right.

    Args:
        current: what all nodes hear of; None: nothing.
        known: the latest one that this node has heard of. If it is later than `current`, that was
            lost, and is put back under a new number: others may have heard of it, too.
        live: the nodes that there are.
        expected: so many make the first view.
        keeps: nobody is left out now, since nodes may not have been heard.
    """
    latest = max((each for each in (current, known) if each is not None), default=None)
    if latest is None:
        return View(1, tuple(sorted(live))) if len(live) >= expected else None
    names = tuple(sorted({*live, *(latest.names if keeps else ())})) or latest.names
    if latest == current and names == latest.names:
        return None
    return View(latest.number + 1, names, (latest.names, *latest.earlier)[:MOST_EARLIER])
