"""Numbered views: which nodes a cluster has, as all of them agree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, NamedTuple

MOST_EARLIER = 4


class View(NamedTuple):
    """The nodes of a cluster until the next view is in force."""

    number: int
    """A later view has a higher number."""
    names: tuple[str, ...]
    """The names of the nodes, `host:port`, sorted."""
    earlier: tuple[tuple[str, ...], ...] = ()
    """The nodes of the views before, the latest first: they may still be reading what is now the
    part of other nodes."""


class Views:
    """Follows the nodes of a cluster, which come and go."""

    size: int
    """Number of nodes that are expected."""
    find_away: Callable[[], Collection[str]] = staticmethod(lambda: ())
    """Returns the names of the nodes that do not answer this one."""

    async def start(self) -> None:
        """Become one of the nodes. Raises: ConfigError if the settings forbid it; ResourceError."""

    async def stop(self) -> None:
        """Stop following."""

    def follow(self) -> AsyncIterator[View]:
        """Views that this node is in, each later than the one before. Raises: ConfigError."""
        raise NotImplementedError

    def find_doubt(self, number: int) -> float | None:
        """Since when the others may have agreed on a view without this node that it has not heard
        of, in monotonic seconds; infinite if they have agreed on one, None if they have not.

        Args:
            number: the number of the view that is in force here.
        """
        return None

    def as_json(self) -> dict[str, Any]:
        """The state for people and metrics."""
        return {}


def propose(
    current: View | None, known: View | None, live: Collection[str], *, expected: int, keeps: bool
) -> View | None:
    """Propose the view that is to replace the current one; None if that is right.

    Args:
        current: the view in etcd; None if there is none.
        known: the latest view that this node has heard of. If it is later than `current`, it was
            lost, and is put back under a new number, since other nodes may have heard of it, too.
        live: the names of the nodes that have a lease.
        expected: the number of nodes that make the first view.
        keeps: whether no node is left out now, since the leases of some may not be known.
    """
    latest = max((each for each in (current, known) if each is not None), default=None)
    if latest is None:
        return View(1, tuple(sorted(live))) if len(live) >= expected else None
    names = tuple(sorted({*live, *(latest.names if keeps else ())})) or latest.names
    if latest == current and names == latest.names:
        return None
    return View(latest.number + 1, names, (latest.names, *latest.earlier)[:MOST_EARLIER])
