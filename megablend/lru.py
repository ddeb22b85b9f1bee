"""A cache of values by key that evicts the least recently used first."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """A cache with a limit on the number of its values or, with `measure`, on their total size. It
    is pickled without its values.

    Thread-safe without a lock: each dict operation is atomic. So it also works after a fork, when a
    lock might be held by a thread that does not exist in the child. Two threads may create a value
    at the same time: both get the value that was stored first.

    Args:
        measure: returns the size of a value; None to count each value as 1.
    """

    def __init__(self, capacity: int, measure: Callable[[V], int] | None = None) -> None:
        self._capacity = capacity
        self._measure = measure
        self._values = OrderedDict[Hashable, V]()  # the most recently used value is the last

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of `key`. If it is not cached, it is created by `make`."""
        value = self.find(key)
        if value is None:
            value = self._values.setdefault(key, make())
            self._use(key)
            self._evict()
        return value

    def find(self, key: Hashable) -> V | None:
        """Return the value of `key`, or None if it is not cached."""
        value = self._values.get(key)
        if value is not None:
            self._use(key)
        return value

    def get_all(
        self, keys: Sequence[Hashable], make: Callable[[list[Any]], Iterable[V]]
    ) -> list[V]:
        """Return the values of `keys`. Values that are not cached are created together, by one call
        of `make` with the list of their keys."""
        values = dict[Hashable, V]()
        missing = list[Hashable]()
        for key in keys:
            value = self._values.get(key)
            if value is None:
                missing.append(key)
            else:
                values[key] = value
        if missing:
            created = dict(zip(missing, make(missing), strict=True))
            values.update(created)
            self._values.update(created)
        for key in keys:
            self._use(key)
        self._evict()
        return [values[key] for key in keys]

    def _use(self, key: Hashable) -> None:
        """Mark a key as the most recently used."""
        with contextlib.suppress(KeyError):  # another thread may have evicted it
            self._values.move_to_end(key)

    def _evict(self) -> None:
        """Remove the least recently used values if there are too many."""
        measure = self._measure
        size = (
            len(self._values) if measure is None else sum(map(measure, list(self._values.values())))
        )
        with contextlib.suppress(KeyError):  # other threads also evict
            while size > self._capacity:
                _, value = self._values.popitem(last=False)
                size -= 1 if measure is None else measure(value)

    def resize(self, capacity: int) -> None:
        """Change the capacity."""
        self._capacity = capacity
        self._evict()

    def __reduce__(self) -> tuple[Any, ...]:
        return LRUCache, (self._capacity, self._measure)
