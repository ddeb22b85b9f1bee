"""The `storage` setting of a config, as `ObjectOptions`: each setting has a parser."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from megablend.storage.mirror_parser import parse_mirror
from megablend.storage.object_options import ObjectOptions, StoreOptions
from megablend.storage.setting_values import (
    Parsers,
    parse_flag,
    parse_number,
    parse_rate,
    parse_seconds,
    parse_settings,
    parse_text,
    parse_whole,
)
from megablend.storage.url_checks import is_region, is_server_url

_SCHEMES = ("s3", "gs", "az", "http", "https")
_SECRETS = ("key", "secret", "token", "password", "sas")
"""Words in the names of settings that would be credentials."""


def parse_options(given: object) -> ObjectOptions:
    """Parse the `storage` setting of a config: URL prefixes, each with its settings, and `mirror`.
    Raises: ValueError, which names the key."""
    if isinstance(given, ObjectOptions):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"found {given!r}, expected URL prefixes, each with its settings")
    mirror = parse_mirror(given["mirror"]) if given.get("mirror") is not None else None
    by_prefix = [
        (str(prefix), _parse_prefix(prefix, settings))
        for prefix, settings in given.items()
        if prefix != "mirror"
    ]
    by_prefix.sort(key=lambda item: len(item[0]))
    return ObjectOptions(tuple(by_prefix), mirror=mirror)


def _parse_prefix(prefix: object, settings: object) -> tuple[tuple[str, Any], ...]:
    """Parse the settings of a URL prefix. Raises: ValueError, which names the key."""
    scheme, mark, _ = str(prefix).partition("://")
    if not mark or scheme.lower() not in _SCHEMES:
        raise ValueError(
            f"{prefix}: expected a URL prefix such as s3://bucket/ ({', '.join(_SCHEMES)}), or `mirror`"
        )
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"{prefix}: found {settings!r}, expected settings such as `endpoint: https://...`"
        )
    try:
        store_settings = _parse_store(settings)
    except ValueError as error:
        raise ValueError(f"{prefix}: {error}") from None
    return tuple(sorted(store_settings.items()))


def _parse_store(settings: Mapping[Any, object]) -> dict[str, Any]:
    """Parse the fields of StoreOptions. Raises: ValueError, also for credentials: a config may be
    readable by others."""
    for name in settings:
        if name not in _PARSERS and any(word in str(name).lower() for word in _SECRETS):
            raise ValueError(
                f"{name}: credentials do not belong in configs; use environment variables or a profile"
            )
    return parse_settings(settings, _PARSERS, StoreOptions)


def _parse_server(value: object) -> str:
    text = parse_text(value)
    if not is_server_url(text):
        raise ValueError(f"found {value!r}, expected a URL such as https://host:port")
    return text


def _parse_region(value: object) -> str:
    text = parse_text(value)
    if not is_region(text):
        raise ValueError(f"found {value!r}, expected the name of a region such as us-east-1")
    return text


def _parse_price(value: object) -> float:
    return float(parse_number(value, "a price"))


_PARSERS: Parsers = {
    "endpoint": _parse_server,
    "region": _parse_region,
    "path_style": parse_flag,
    "account": parse_text,
    "profile": parse_text,
    "anonymous": parse_flag,
    "requester_pays": parse_flag,
    "versions": parse_flag,
    "ca_file": parse_text,
    "proxy": _parse_server,
    "connect_timeout": parse_seconds,
    "read_timeout": parse_seconds,
    "give_up_after": parse_seconds,
    "hedges": parse_flag,
    "max_requests": partial(parse_whole, unit="requests"),
    "max_source_rate": parse_rate,
    "max_request_rate": lambda value: parse_number(value, "requests per second"),
    "price_per_1000_requests": _parse_price,
    "price_per_gb": _parse_price,
}
"""The parser of each field of StoreOptions."""
assert _PARSERS.keys() == {option.name for option in dataclasses.fields(StoreOptions)}
