"""Make the paths and URLs of a config absolute, and refuse those that no storage can read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megablend.caches.find import check_location, is_remote
from megablend.config.complaints import Place, Places
from megablend.config.model import Config
from megablend.config.source import Source
from megablend.errors import ConfigError
from megablend.storage.location import check_schemes, find_scheme, join, lower_scheme
from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.urls import LIST_ENDING, expand_location, is_web, split_query
from megablend.storage.registry import OBJECT_SCHEMES, explain_scheme, find_storage
from megablend.storage.store_options import make_files_absolute
from megablend.storage.url_checks import check_secrets


def make_paths_absolute(config: Config, base: Path, places: Places) -> Config:
    """Return a config with absolute paths. Each of its sources knows where the config defines it.
    Unsupported locations are refused.

    Args:
        base: the folder for relative paths.
        places: the line numbers of the config's keys.
    Raises: ConfigError.
    """
    urls: dict[str, str] = {}
    cache = make_cache_absolute(config.cache, base, Place(places, ("cache",)))
    token_files = f"{cache}/tokens"
    if config.token_files is not None:
        place = Place(places, ("token_files",))
        token_files = make_cache_absolute(config.token_files, base, place)

    sources = dict[str, tuple[Source, ...]]()
    for split, listed in config.sources.items():
        above = ("sources", split) if config.listed_by_split else ("sources",)
        absolute = list[Source]()
        for i, source in enumerate(listed):
            place = Place(places, (*above, i, "path"))
            changes: dict[str, Any] = {"path": _find_locations(source.path, base, place, urls)}
            if isinstance(source.vocab_size, str):
                place = Place(places, (*above, i, "vocab_size"))
                changes["vocab_size"] = _absolute_path(source.vocab_size, base, place)
            absolute.append(source.model_copy(update=changes))
            absolute[i]._place = Place(places, (*above, i))
            absolute[i]._token_files = token_files
        sources[split] = tuple(absolute)
    update: dict[str, Any] = {
        "cache": cache,
        "token_files": token_files if config.token_files is not None else None,
        "sources": sources,
    }
    if config.local_cache is not None:
        place = Place(places, ("local_cache",))
        update["local_cache"] = _absolute_path(config.local_cache, base, place)
    if isinstance(config.vocab_size, str):
        place = Place(places, ("vocab_size",))
        update["vocab_size"] = _absolute_path(config.vocab_size, base, place)
    if config.tokenizer is not None:
        path = base / Path(config.tokenizer).expanduser()
        if path.exists():  # otherwise it is the name of a model
            update["tokenizer"] = str(path)
    if urls or config.storage != ObjectOptions():
        objects = make_files_absolute(config.storage, base)
        update["storage"] = dataclasses.replace(objects, urls=tuple(urls.items()))
    return config.model_copy(update=update)


def _find_locations(
    written: Sequence[str], base: Path, place: object, urls: dict[str, str]
) -> tuple[str, ...]:
    """Return the locations of data files: absolute paths, and URLs whose scheme is supported.

    Args:
        written: paths, URLs (which may contain braces), and text files of URLs.
        urls: a dict to which the query string of each web URL is added, by the URL without its
            query. Requests need the query, but the returned locations do not contain it.
    """
    locations = list[str]()
    for location in written:
        if not find_scheme(location) and not location.endswith(LIST_ENDING):
            locations.append(_absolute_path(location, base, place))
            continue
        for url in _expand_urls(lower_scheme(location), base, place):
            locations.append(_take_query(_check_url(url, base, place), urls))
    if len(locations) > 1:
        try:
            check_schemes(locations)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error
    return tuple(locations)


def _expand_urls(location: str, base: Path, place: object) -> list[str]:
    """Expand a URL with braces, or a text file of URLs, to a list of URLs. Any other location is
    returned unchanged, as the only item."""
    try:
        if not find_scheme(location):
            location = _absolute_path(location, base, place)
        return expand_location(location)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _take_query(location: str, urls: dict[str, str]) -> str:
    """Return a location without its query string; if it is a web URL, record the query in `urls`.
    Raises: ConfigError if `urls` has another query for the same URL."""
    if not is_web(location):
        return location
    plain, query = split_query(location)
    if urls.setdefault(plain, query) != query:
        raise ConfigError(
            f"{plain}: is given twice, with different queries (the part after `?`); keep one"
        )
    return plain


def _check_url(location: str, base: Path, place: object) -> str:
    """Return a URL after checking that its scheme is supported. Other locations are returned as
    absolute paths."""
    location = lower_scheme(location)
    scheme = find_scheme(location)
    if not scheme or scheme == "file" or "\0" in location:
        return _absolute_path(location, base, place)
    if find_storage(scheme) is None:
        raise ConfigError(f"{place}: found {location!r}; {explain_scheme(scheme)}")
    if not is_web(location):
        try:
            check_secrets(location)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
    return location


def make_cache_absolute(location: str, base: Path, place: object) -> str:
    """Return the location of a cache: a URL if it is a prefix of an object store, otherwise an
    absolute path.

    Args:
        place: where the setting is, for messages.

    Raises: ConfigError.
    """
    scheme, colon, key = location.partition(":/")
    if colon and scheme.lower() in OBJECT_SCHEMES and not key.startswith("/"):
        raise ConfigError(
            f"{place}: found {location!r}, expected {scheme}://{key}; pass it as a string, since pathlib removes a slash"
        )
    location = lower_scheme(location)
    if not is_remote(location) or location.startswith("file://") or "\0" in location:
        return _absolute_path(location, base, place)
    try:
        check_location(location)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return location.rstrip("/")


def _absolute_path(path: str, base: Path, place: object) -> str:
    """Return an absolute path; `~` is replaced by the home folder. Raises: ConfigError if the path
    is empty, a URL, or contains NUL."""
    if "\0" in path:
        raise ConfigError(f"{place}: found {path!r}, which contains a NUL character; remove it")
    if not path:
        raise ConfigError(f"{place}: found '', expected a path; use `.` for the current folder")
    if path.startswith("file://"):
        raise ConfigError(
            f"{place}: found {path!r}; write it as a plain path: `{_plain_path(path)}`"
        )
    if "://" in path:
        raise ConfigError(f"{place}: found {path!r}, expected a path on a local or mounted disk")
    return join(str(base), os.path.expanduser(path))  # noqa: PTH111  (a Path loses a leading `./`, and so expands `./~x`)


def _plain_path(url: str) -> str:
    """Return the path of a file:// URL. It is relative if the URL has only two slashes. Percent
    signs are literal, as in other paths."""
    rest = url.removeprefix("file://")
    return rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
