"""The cache of decoded dictionaries of recently read column chunks: one per process, of limited
size, for any number of files."""

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
"""The number of the reader, and the offset of the dictionary page."""

DICTIONARY_BYTES = 64 << 20
"""Maximum size of all cached dictionaries of a process. A single dictionary is cached even if it is
larger."""


class DictionaryCache:
    """A cache of arrays by key; the least recently used are evicted if the total exceeds the limit.
    Thread-safe, even after a fork."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arrays: OrderedDict[Key, Array] = OrderedDict()
        self._bytes = 0
        self.unlock_after_fork()

    def unlock_after_fork(self) -> None:
        """Replace the locks: threads that do not exist in the child may have held them."""
        self._lock = threading.Lock()
        self._loading: dict[Key, threading.Lock] = {}

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._arrays

    def get(self, key: Key, load: Callable[[], Array]) -> Array:
        """Return the array under `key`; if it is not cached, one thread loads it while others wait.
        Raises: the same errors as `load`."""
        with self._lock:
            cached = self._find(key)
            if cached is not None:
                return cached
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            # Another thread may have loaded it meanwhile
            with self._lock:
                cached = self._find(key)
                if cached is not None:
                    return cached
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
                    self._loading.pop(key, None)

    def _find(self, key: Key) -> Array | None:
        """Return the array under `key`, and mark it as used; return None if it is not cached. The
        caller must hold the lock."""
        cached = self._arrays.get(key)
        if cached is not None:
            self._arrays.move_to_end(key)
        return cached

    def resize(self, max_bytes: int) -> None:
        """Change the limit to `max_bytes`."""
        with self._lock:
            self._max_bytes = max_bytes
            self._shrink()

    def clear(self) -> None:
        """Remove all arrays."""
        with self._lock:
            self._arrays.clear()
            self._bytes = 0

    def _shrink(self) -> None:
        """Evict the least recently used arrays until the others are within the limit. The caller
        must hold the lock."""
        while self._bytes > self._max_bytes and len(self._arrays) > 1:
            _, evicted = self._arrays.popitem(last=False)
            self._bytes -= evicted.nbytes


CACHE = DictionaryCache(DICTIONARY_BYTES)
os.register_at_fork(after_in_child=CACHE.unlock_after_fork)
# At exit, Python frees the cache late, since the hook for forks refers to it; its arrays may be in
# a memory pool that the program has set in pyarrow, which no longer exists then
atexit.register(CACHE.clear)
READERS = itertools.count()
"""A counter that numbers the readers of the process. A path is not unique: two readers of one path
may have opened different files."""
