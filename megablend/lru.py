"""A small cache of values by key that evicts the least recently used first."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """Keeps up to `capacity` values; pickled without them.

    Thread-safe, also after a fork, without a lock, which a thread that does not exist in the child could hold: each
    dict operation is atomic. Two threads may create a value at the same time: both get the one that was stored
    first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept = OrderedDict[Hashable, V]()  # the most recently used is the last

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of `key`, created if it is not cached."""
        value = self._kept.get(key)
        if value is None:
            value = self._kept.setdefault(key, make())
        with contextlib.suppress(KeyError):  # another thread may have evicted it
            self._kept.move_to_end(key)
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return value

    def resize(self, capacity: int) -> None:
        """Change the capacity."""
        self._capacity = capacity

    def __reduce__(self) -> tuple[Any, ...]:
        return LRUCache, (self._capacity,)
