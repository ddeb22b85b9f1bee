"""Views: numbered lists of the nodes of a cluster, on which all of these nodes agree."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

MOST_EARLIER = 4
"""The maximum number of earlier views that a view contains."""


class View(NamedTuple):
    """A numbered list of the nodes of a cluster, in force until the next view replaces it."""

    number: int
    """The number of the view. Later views have higher numbers."""
    names: tuple[str, ...]
    """The names of the nodes, `host:port`, sorted."""
    earlier: tuple[tuple[str, ...], ...] = ()
    """The nodes of earlier views, the latest view first. They may still be reading pieces whose
    homes are now other nodes."""


def propose(
    current: View | None, known: View | None, live: Collection[str], *, expected: int, keeps: bool
) -> View | None:
    """Return the view that should replace the current view; None if that is up to date.

    Args:
        current: the view in etcd; None if there is none.
        known: the latest view that this node knows; None if it knows no view. If it is later than
            `current`, etcd has lost data. Then the new view gets a number that is higher than that
            of `known`, since other nodes may know it.
        live: the names of the nodes that have a lease.
        expected: the number of nodes that must have leases before the first view is made.
        keeps: whether all nodes of the latest view are kept, since leases may be unknown.
    """
    latest = max((view for view in (current, known) if view is not None), default=None)
    if latest is None:
        return View(1, tuple(sorted(live))) if len(live) >= expected else None
    names = tuple(sorted({*live, *(latest.names if keeps else ())})) or latest.names
    if latest == current and names == latest.names:
        return None
    return View(latest.number + 1, names, (latest.names, *latest.earlier)[:MOST_EARLIER])
