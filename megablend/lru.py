"""A few things that were made, by key: the least recently used goes first."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """Keeps up to `capacity` values; pickled without them.

    Safe to share between threads, and after a fork, without a lock, which a thread that the child does not have could hold: each
    step on the dict is one of the interpreter's. Two threads may make a value at the same time: both get the one that was there
    first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept = OrderedDict[Hashable, V]()  # the last one used is the last

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of `key`, made where it is not kept."""
        value = self._kept.get(key)
        if value is None:
            value = self._kept.setdefault(key, make())
        with contextlib.suppress(KeyError):  # others may have pushed it out meanwhile
            self._kept.move_to_end(key)
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return value

    def resize(self, capacity: int) -> None:
        """Keep up to `capacity` values from now on."""
        self._capacity = capacity

    def __reduce__(self) -> tuple[Any, ...]:
        return LRUCache, (self._capacity,)
