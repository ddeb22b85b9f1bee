"""A few things that were made, by key: the least recently used goes first."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """Keeps up to `capacity` values; pickled without them.

    Safe to share between threads, and after a fork, without a lock, which a thread that the child does not have could hold: each
    step on the dict is one of the interpreter's. Two threads may make the same value, so making it twice does no harm.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: dict[Hashable, V] = {}  # the last one used is the last one put in

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of `key`, made where it is not kept."""
        found = self._kept.pop(key, None)
        value = make() if found is None else found
        self._kept[key] = value
        if len(self._kept) > self._capacity:
            for old in list(self._kept)[: -self._capacity]:
                self._kept.pop(old, None)
        return value

    def resize(self, capacity: int) -> None:
        """Keep up to `capacity` values from now on."""
        self._capacity = capacity

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, (self._capacity,)
