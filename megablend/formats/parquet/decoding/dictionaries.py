"""Decoded dictionaries of recently read column chunks:
one bounded cache per process, for any number of files."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
Key = tuple[int, int]
"""Number of the reader, offset of the dictionary page."""

DICTIONARY_BYTES = 64 << 20
"""Limit for all cached dictionaries of a process; a single larger one is still cached."""


class DictionaryCache:
    """Arrays by key; the least recently used are evicted when there are too many bytes.
    Thread-safe, also after a fork."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arrays: OrderedDict[Key, Array] = OrderedDict()
        self._bytes = 0
        self.unlock_after_fork()

    def unlock_after_fork(self) -> None:
        """Replace the locks: threads that do not exist in the child may have held them."""
        self._lock = threading.Lock()
        self._turns: dict[Key, threading.Lock] = {}

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._arrays

    def get(self, key: Key, load: Callable[[], Array]) -> Array:
        """The array under `key`; if it is not cached, one thread loads it while others wait.
        Raises what `load` raises."""
        with self._lock:
            if (found := self._found(key)) is not None:
                return found
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                if (found := self._found(key)) is not None:
                    return found
            try:
                loaded = load()
                with self._lock:
                    if key not in self._arrays:
                        self._arrays[key] = loaded
                        self._bytes += loaded.nbytes
                    self._shrink()
                return loaded
            finally:
                with self._lock:
                    self._turns.pop(key, None)

    def _found(self, key: Key) -> Array | None:
        """Look `key` up (the lock is held)."""
        found = self._arrays.get(key)
        if found is not None:
            self._arrays.move_to_end(key)
        return found

    def resize(self, max_bytes: int) -> None:
        """Change the limit to `max_bytes`."""
        with self._lock:
            self._max_bytes = max_bytes
            self._shrink()

    def clear(self) -> None:
        """Forget all arrays."""
        with self._lock:
            self._arrays.clear()
            self._bytes = 0

    def _shrink(self) -> None:
        """Evict the least recently used (the lock is held)."""
        while self._bytes > self._max_bytes and len(self._arrays) > 1:
            self._bytes -= self._arrays.popitem(last=False)[1].nbytes


CACHE = DictionaryCache(DICTIONARY_BYTES)
os.register_at_fork(after_in_child=CACHE.unlock_after_fork)
# What Python calls after a fork, and with it the cache, it frees last; arrays may be in a memory pool
# of pyarrow that the program has set, which is gone then.
atexit.register(CACHE.clear)
READERS = itertools.count()
"""A number for each reader: two of one path may have opened different files."""
