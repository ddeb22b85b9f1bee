"""Values that are computed when they are first needed: `LazyItems`, and `cached_property` without a
lock, as in Python 3.12.

In Python 3.10 and 3.11, `functools.cached_property` holds a lock while it computes, one for all
objects of a class. A process that is forked while another thread computes would wait for that lock
forever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:  # noqa: N801  # the name that it has in functools
        """An attribute that is computed when it is first read, and then stored. Two threads may
        both compute it."""

        def __init__(self, compute):
            self.compute = compute
            self.__doc__ = compute.__doc__

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = self.compute(instance)
            instance.__dict__[self.name] = value
            return value


T_co = TypeVar("T_co", covariant=True)


class LazyItems(Sequence[T_co]):
    """A sequence whose items are created one by one, each when it is first needed.

    Equal to a tuple or another LazyItems with equal items.

    Args:
        size: the number of items.
        make: returns the item with a given number; called once for each item, unless several
            threads need the item at the same time. An item must not be None.
    """

    def __init__(self, size: int, make: Callable[[int], T_co]) -> None:
        self._make = make
        self._items = list[T_co | None]([None]) * size

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, index: int | slice) -> T_co | tuple[T_co, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        item = self._items[index]
        if item is None:
            item = self._make(range(len(self._items))[index])
            self._items[index] = item
        return item

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyItems | tuple):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


__all__ = ["LazyItems", "cached_property"]
