"""Replacing locks in a forked child: a thread that the child does not have may have held them."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Unlockable(Protocol):
    """An object that has locks."""

    def unlock_after_fork(self) -> None:
        """Replace the locks, and repair data that a thread which held a lock may have left
        half-done."""
        ...


_objects: WeakSet[Unlockable] = WeakSet()


def unlock_in_children(unlockable: Unlockable) -> None:
    """Call `unlock_after_fork` of an object in forked children, as long as the object exists."""
    _objects.add(unlockable)


def _unlock_all() -> None:
    for each in list(_objects):
        each.unlock_after_fork()


os.register_at_fork(after_in_child=_unlock_all)
