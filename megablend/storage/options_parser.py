"""The `storage` setting of a config, as `ObjectOptions`: each setting has a parser."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from megablend.errors import did_you_mean
from megablend.storage.mirror_options import parse_mirror
from megablend.storage.object_options import ObjectOptions, StoreOptions
from megablend.storage.url_checks import is_region, is_server_url

_SCHEMES = ("s3", "gs", "az", "http", "https")
_SECRETS = ("key", "secret", "token", "password", "sas")
"""Words in the names of settings that would be credentials."""
_DEFAULTS = {each.name: each.default for each in dataclasses.fields(StoreOptions)}


def parse_options(given: object) -> ObjectOptions:
    """The `storage` setting of a config: prefixes to settings, and `mirror`.
    Raises: ValueError, which names the key."""
    if isinstance(given, ObjectOptions):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"found {given!r}, expected URL prefixes, each with its settings")
    parsed = []
    mirror = parse_mirror(given["mirror"]) if given.get("mirror") is not None else None
    for prefix, settings in given.items():
        if prefix == "mirror":
            continue
        scheme, mark, _ = str(prefix).partition("://")
        if not mark or scheme.lower() not in _SCHEMES:
            raise ValueError(
                f"{prefix}: expected a URL prefix such as s3://bucket/ ({', '.join(_SCHEMES)}), or `mirror`"
            )
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"{prefix}: found {settings!r}, expected settings such as `endpoint: https://...`"
            )
        parsed.append((str(prefix), tuple(sorted(_parse_settings(str(prefix), settings).items()))))
    by_prefix = tuple(sorted(parsed, key=lambda item: len(item[0])))
    return ObjectOptions(by_prefix, mirror=mirror)


def _parse_settings(prefix: str, settings: Mapping[Any, object]) -> dict[str, Any]:
    parsed = {}
    for name, value in settings.items():
        parse = _PARSERS.get(str(name))
        if parse is None:
            if any(word in str(name).lower() for word in _SECRETS):
                raise ValueError(
                    f"{prefix}: {name}: credentials do not belong in configs; use environment variables or a profile"
                )
            raise ValueError(
                f"{prefix}: {name}: unknown setting{did_you_mean(str(name), _PARSERS, before='; ')}"
            )
        # None is like no setting, where it is what no setting is
        if value is not None or _DEFAULTS[str(name)] is not None:
            parsed[str(name)] = parse(f"{prefix}: {name}", value)
    return parsed


def _parse_flag(place: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{place}: found {value!r}, expected true or false")
    return value


def _parse_text(place: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{place}: found {value!r}, expected text")
    if "@" in value.partition("://")[2].partition("/")[0]:
        raise ValueError(
            f"{place}: contains a user or password; set it in the environment (HTTPS_PROXY for a proxy)"
        )
    return value


def _parse_server(place: str, value: object) -> str:
    text = _parse_text(place, value)
    if not is_server_url(text):
        raise ValueError(f"{place}: found {value!r}, expected a URL such as https://host:port")
    return text


def _parse_region(place: str, value: object) -> str:
    text = _parse_text(place, value)
    if not is_region(text):
        raise ValueError(
            f"{place}: found {value!r}, expected the name of a region such as us-east-1"
        )
    return text


def _parse_seconds(place: str, value: object) -> float:
    return float(_parse_number(place, value, "seconds"))


def _parse_price(place: str, value: object) -> float:
    return float(_parse_number(place, value, "a price"))


def _parse_rate(place: str, value: object) -> int:
    return _to_whole(place, _parse_number(place, value, "bytes per second"))


def _parse_count(place: str, value: object) -> int:
    return _to_whole(place, _parse_number(place, value, "requests"))


def _parse_number(place: str, value: object, unit: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{place}: found {value!r}, expected a number above 0 ({unit})")
    return value


def _to_whole(place: str, value: int | float) -> int:
    if value != int(value):
        raise ValueError(f"{place}: found {value!r}, expected a whole number")
    return int(value)


_PARSERS: dict[str, Callable[[str, object], object]] = {
    "endpoint": _parse_server,
    "region": _parse_region,
    "path_style": _parse_flag,
    "account": _parse_text,
    "profile": _parse_text,
    "anonymous": _parse_flag,
    "requester_pays": _parse_flag,
    "versions": _parse_flag,
    "ca_file": _parse_text,
    "proxy": _parse_server,
    "connect_timeout": _parse_seconds,
    "read_timeout": _parse_seconds,
    "give_up_after": _parse_seconds,
    "max_requests": _parse_count,
    "max_source_rate": _parse_rate,
    "price_per_1000_requests": _parse_price,
    "price_per_gb": _parse_price,
}
"""What each field of StoreOptions may be: a function of its place, for messages, and the value that
was written. Raises: ValueError."""
assert _PARSERS.keys() == _DEFAULTS.keys()
