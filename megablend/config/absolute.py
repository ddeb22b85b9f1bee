"""Makes the paths and URLs of a config absolute, and refuses those that no storage reads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from megablend.caches.find import check_location, is_remote
from megablend.config.complaints import Places, join_keys
from megablend.config.model import Config
from megablend.config.source import Source
from megablend.errors import ConfigError
from megablend.storage.location import check_schemes, find_scheme, lower_scheme, make_absolute
from megablend.storage.object_options import check_signature, make_files_absolute
from megablend.storage.objects.urls import LIST_ENDING, expand_location, is_web, split_query
from megablend.storage.registry import explain_scheme, find_storage


def make_paths_absolute(config: Config, base: Path, places: Places) -> Config:
    """Make paths absolute, refuse unsupported locations,
    and record in each source where the config defines it.

    Args:
        base: the folder that relative paths are relative to.

    Raises: ConfigError.
    """

    def vocab_size(given: int | str | None, place: str) -> int | str | None:
        return (
            _absolute_path(given, base, f"{place}.vocab_size") if isinstance(given, str) else given
        )

    urls: dict[str, str] = {}

    def placed(source: Source, *location: str | int) -> Source:
        place = f"{places.line(location)}: {join_keys(location)}"
        listed = (
            each for path in source.path for each in _expand_urls(path, base, f"{place}.path")
        )
        paths = tuple(
            _take_query(_absolute_location(path, base, f"{place}.path"), urls) for path in listed
        )
        _check_one_storage(paths, f"{place}.path")
        found = source.model_copy(
            update={"path": paths, "vocab_size": vocab_size(source.vocab_size, place)}
        )
        found._place = place
        return found

    sources = {}
    for split, listed in config.sources.items():
        above = ("sources", split) if config.listed_by_split else ("sources",)
        sources[split] = tuple(placed(source, *above, i) for i, source in enumerate(listed))
    cache = make_cache_absolute(config.cache, base, f"{places.line(['cache'])}: cache")
    local_cache = config.local_cache
    if local_cache is not None:
        local_cache = _absolute_path(
            local_cache, base, f"{places.line(['local_cache'])}: local_cache"
        )
    size = vocab_size(config.vocab_size, places.line(["vocab_size"]))
    objects = make_files_absolute(config.storage, base)
    objects = dataclasses.replace(objects, urls=tuple(urls.items())) if urls else objects
    update = {
        "cache": cache,
        "local_cache": local_cache,
        "sources": sources,
        "vocab_size": size,
        "storage": objects,
    }
    return config.model_copy(update=update)


def _expand_urls(location: str, base: Path, place: str) -> list[str]:
    """The URLs that a location expands to (a URL with braces, or a text file of URLs); other
    locations as they are."""
    location = lower_scheme(location)
    is_list = location.endswith(LIST_ENDING) and not find_scheme(location)
    try:
        return expand_location(_absolute_path(location, base, place) if is_list else location)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _take_query(location: str, urls: dict[str, str]) -> str:
    """The location without a URL's query, which is recorded in `urls` for use in requests."""
    if not is_web(location):
        return location
    plain, query = split_query(location)
    if urls.setdefault(plain, query) != query:
        raise ConfigError(f"{plain}: given with two different queries; keep one")
    return plain


def _absolute_location(location: str, base: Path, place: str) -> str:
    """The location of data: a URL if a storage handles its scheme, otherwise an absolute path."""
    location = lower_scheme(location)
    scheme = find_scheme(location)
    if scheme and scheme != "file" and "\0" not in location:
        if find_storage(scheme) is None:
            raise ConfigError(f"{place}: found {location!r}; {explain_scheme(scheme)}")
        if not is_web(location):
            _check_signature(location, place)
        return location
    return _absolute_path(location, base, place)


def make_cache_absolute(location: str, base: Path, place: str) -> str:
    """The location of a cache: the URL of a prefix of an object store unchanged,
    otherwise an absolute path.

    Args:
        place: of the setting, for messages.

    Raises: ConfigError.
    """
    location = lower_scheme(location)
    if not is_remote(location) or location.startswith("file://") or "\0" in location:
        return _absolute_path(location, base, place)
    _check_signature(location, place)
    try:
        check_location(location)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return location.rstrip("/")


def _check_signature(location: str, place: str) -> None:
    try:
        check_signature(location)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _check_one_storage(locations: Sequence[str], place: str) -> None:
    try:
        check_schemes(locations)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


def _absolute_path(path: str, base: Path, place: str) -> str:
    if "\0" in path:
        raise ConfigError(f"{place}: found {path!r}; paths cannot contain NUL")
    if not path:
        raise ConfigError(f"{place}: found '', expected a path; use `.` for the current folder")
    if path.startswith("file://"):
        raise ConfigError(
            f"{place}: found {path!r}; write it as a plain path: `{_plain_path(path)}`"
        )
    if "://" in path:
        raise ConfigError(f"{place}: found {path!r}; expected a path on a local or mounted disk")
    return make_absolute(os.path.expanduser(path), str(base))  # noqa: PTH111  (a Path loses a leading `./`, and so expands `./~x`)


def _plain_path(url: str) -> str:
    """The path of a file:// URL, relative if it has two slashes.
    Percent signs are literal, as in other paths."""
    rest = url.removeprefix("file://")
    return rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
