"""The store of a cache, by its location."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from megablend.caches.base import CacheStore
from megablend.caches.local import LocalCacheStore

CacheLike: TypeAlias = "str | Path | CacheStore"


def find_store(cache: CacheLike) -> CacheStore:
    """The store of a cache, given by its folder; a store is returned as it is."""
    if isinstance(cache, str | Path):
        return LocalCacheStore(cache)
    return cache
