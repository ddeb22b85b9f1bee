"""Settings of a config's `storage`: how their values are written, and what they become.
Parsers raise ValueError with what was found and what was expected; callers add the place."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from megablend.errors import did_you_mean
from megablend.storage.location import find_scheme

_SIZE = re.compile(r"\s*([0-9.e+_]+)\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE)
_MOST_DIGITS = 100
"""A size with more is refused: a typing error such as 1e999999999 would be computed digit by
digit."""

Parsers = Mapping[str, Callable[[object], object]]
"""By the name of a setting: the function that parses its value."""


def parse_settings(given: Mapping[Any, object], parsers: Parsers, kind: type) -> dict[str, Any]:
    """Parse the values of settings. Returns: what was parsed, by name.

    Args:
        kind: the dataclass whose fields the settings are. A value of None is left out if that is
            the field's default.

    Raises: ValueError, which names the setting.
    """
    defaults = {each.name: each.default for each in dataclasses.fields(kind)}
    parsed = dict[str, Any]()
    for name, value in given.items():
        parse = parsers.get(str(name))
        if parse is None:
            hint = did_you_mean(str(name), parsers, before="; ")
            raise ValueError(f"{name}: unknown setting{hint}")
        if value is None and defaults[str(name)] is None:
            continue
        try:
            parsed[str(name)] = parse(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return parsed


def parse_flag(value: object) -> bool:
    """Parse true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"found {value!r}, expected true or false")
    return value


def parse_text(value: object) -> str:
    """Parse text that is not empty, or a path; a URL must not contain a user or password."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"found {value!r}, expected text")
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise ValueError(
            "contains a user or password; set it in the environment (HTTPS_PROXY for a proxy)"
        )
    return text


def parse_local_path(value: object) -> str:
    """Parse a path on this machine, which stays as it was written."""
    path = parse_text(value)
    if find_scheme(path):
        raise ValueError(f"found {value!r}, expected a path on this machine, without a scheme")
    return path


def parse_number(value: object, unit: str) -> int | float:
    """Parse a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"found {value!r}, expected a number above 0 ({unit})")
    return value


def parse_whole(value: object, unit: str) -> int:
    """Parse a whole number above 0, which may be written as 1e9 or 2.0."""
    number = parse_number(value, unit)
    if number != int(number):
        raise ValueError(f"found {value!r}, expected a whole number")
    return int(number)


def parse_seconds(value: object) -> float:
    """Parse a number of seconds, above 0."""
    return float(parse_number(value, "seconds"))


def parse_rate(value: object) -> int:
    """Parse a number of bytes per second, above 0."""
    return parse_whole(value, "bytes per second")


def parse_size(value: object, *, least: int = 1) -> int:
    """Parse a size that is written as 512MiB, 1.5 GB or 4e9 to bytes, rounded down."""
    written = _SIZE.fullmatch(str(value))
    try:
        if written is None or isinstance(value, bool):
            raise InvalidOperation
        number = Decimal(written[1].replace("_", ""))
        if number.adjusted() > _MOST_DIGITS:
            raise InvalidOperation
    except InvalidOperation:
        raise ValueError(f"found {value!r}, expected a size such as 512MiB") from None
    base = 1024 if written[3] else 1000
    size = int(Fraction(number) * base ** " KMGT".index((written[2] or " ").upper()))
    if size < least:
        raise ValueError(f"found {value!r}, expected more than 0")
    return size
