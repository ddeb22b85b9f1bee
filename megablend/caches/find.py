"""Find the store of a cache by the cache's location."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from megablend.caches.base import CacheStore
from megablend.caches.local import LocalCacheStore
from megablend.errors import CacheError, ConfigError, UnsupportedFileError
from megablend.storage.location import find_scheme
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.address import check_key, parse_location
from megablend.storage.url_checks import check_secrets

CacheLike: TypeAlias = "str | Path | CacheStore"
SCHEMES = ("s3", "gs", "az")
"""The URL schemes of the object stores that a cache can be kept in."""
LOCAL_CACHE_VARIABLE = "MEGABLEND_LOCAL_CACHE"
"""The environment variable that names the folder for this node's copies of caches in object
stores."""


def find_store(
    cache: CacheLike, options: ObjectOptions | None = None, local_cache: str | None = None
) -> CacheStore:
    """Return the store of a cache. The cache need not have been built yet.

    Args:
        cache: the folder of the cache, or its URL in an object store; a store is returned
            unchanged.
        options: the settings for object stores; None for the environment's settings.
        local_cache: the folder for this node's copies of caches in object stores; None for the
            folder that MEGABLEND_LOCAL_CACHE names, or the default.

    Raises: ConfigError for a URL that cannot be a cache.
    """
    if not isinstance(cache, str | Path):
        return cache
    if not is_remote(cache):
        folder = str(cache)
        return _open_local(folder) if folder.startswith("/") else LocalCacheStore(cache)
    check_location(str(cache))
    local_cache = local_cache or os.environ.get(LOCAL_CACHE_VARIABLE) or None
    return _open_remote(str(cache).rstrip("/"), options or ObjectOptions(), local_cache)


def find_existing(cache: CacheLike) -> CacheStore:
    """Return the store of a cache that has been built. Raises: CacheError if it has not been built;
    the same errors as `find_store`."""
    store = find_store(cache)
    if not store.exists():
        raise CacheError(
            f"{store.location}: there is no cache here: build one, or specify another location"
        )
    return store


def is_remote(cache: object) -> bool:
    """Return whether the location of a cache is a URL."""
    return isinstance(cache, str) and bool(find_scheme(cache))


def check_location(location: str) -> None:
    """Check that a URL can be the location of a cache. Raises: ConfigError."""
    scheme = find_scheme(location)
    expected = "expected a folder, or a prefix such as s3://bucket/caches/name"
    # The messages omit the rest of the URL, which may be secret
    if scheme in ("http", "https"):
        raise ConfigError(f"{scheme}://...: web servers are read-only; {expected}")
    if scheme not in SCHEMES:
        raise ConfigError(f"{scheme}://...: cannot hold a cache; {expected}")
    check_secrets(location)
    if not location.partition("://")[2].strip("/").partition("/")[2]:
        raise ConfigError(f"{location}: names a whole bucket; {expected}")
    try:
        check_key(location, parse_location(location.rstrip("/")).key)
    except UnsupportedFileError as error:
        raise ConfigError(f"{error.path}: {error.problem.partition(';')[0]}; {expected}") from None


@lru_cache(maxsize=64)
def _open_local(folder: str) -> CacheStore:
    """Return the store of a cache in a folder, given its absolute path. The store has no state, so
    all callers share it."""
    return LocalCacheStore(folder)


@lru_cache(maxsize=64)
def _open_remote(location: str, options: ObjectOptions, local_cache: str | None) -> CacheStore:
    """Return the store of a cache in an object store. Callers with the same options share it."""
    from megablend.caches.objects.store import ObjectCacheStore

    return ObjectCacheStore(location, options, local_cache)
