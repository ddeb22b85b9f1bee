"""Numbered views: the nodes of a cluster, on which all of them agree."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

MOST_EARLIER = 4
"""The number of earlier views that a view remembers."""


class View(NamedTuple):
    """The nodes of a cluster until the next view is in force."""

    number: int
    """The number, which is higher for a later view."""
    names: tuple[str, ...]
    """The names of the nodes, `host:port`, sorted."""
    earlier: tuple[tuple[str, ...], ...] = ()
    """The nodes of earlier views, the latest first: they may still be reading pieces whose homes
    are now other nodes."""


def propose(
    current: View | None, known: View | None, live: Collection[str], *, expected: int, keeps: bool
) -> View | None:
    """Return the view that should replace the current one; None if the current one is right.

    Args:
        current: the view in etcd; None if there is none.
        known: the latest view that this node knows. If it is later than `current`, etcd has lost
            it: it is put back under a new number, since other nodes may know it.
        live: the names of the nodes that have a lease.
        expected: the number of nodes that make the first view.
        keeps: whether no node of the latest view is left out, since some leases may be unknown.
    """
    latest = max((each for each in (current, known) if each is not None), default=None)
    if latest is None:
        return View(1, tuple(sorted(live))) if len(live) >= expected else None
    names = tuple(sorted({*live, *(latest.names if keeps else ())})) or latest.names
    if latest == current and names == latest.names:
        return None
    return View(latest.number + 1, names, (latest.names, *latest.earlier)[:MOST_EARLIER])
