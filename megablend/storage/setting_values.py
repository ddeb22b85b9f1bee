"""Parsers of the values of a config's `storage` settings. They raise ValueError with the value that
was found and what was expected; callers add the name of the setting."""

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
_MAX_DIGITS = 100
"""The most digits of a size: a typing error such as 1e999999999 would be computed digit by digit."""

Parsers = Mapping[str, Callable[[object], object]]
"""Functions that parse the values of settings, by the names of the settings."""


def parse_settings(
    settings: Mapping[Any, object], parsers: Parsers, options_class: type
) -> dict[str, Any]:
    """Parse the values of settings. Returns: the parsed values, by name.

    Args:
        options_class: the dataclass whose fields the settings are. A value of None is left out if
            None is the field's default.

    Raises: ValueError, which names the setting.
    """
    defaults = {option.name: option.default for option in dataclasses.fields(options_class)}
    parsed = dict[str, Any]()
    for name, value in settings.items():
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


def parse_size(value: object, *, minimum: int = 1) -> int:
    """Parse a size that is written as 512MiB, 1.5 GB or 4e9 to bytes, rounded down."""
    size = None if isinstance(value, bool) else _read_size(str(value))
    if size is None:
        raise ValueError(f"found {value!r}, expected a size such as 512MiB")
    if size < minimum:
        raise ValueError(f"found {value!r}, expected more than 0")
    return size


def _read_size(text: str) -> int | None:
    """Return the bytes that a text stands for; None if the text is not a size."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    digits, unit, binary_mark = found.groups()
    try:
        number = Decimal(digits.replace("_", ""))
    except InvalidOperation:
        return None
    if number.adjusted() > _MAX_DIGITS:
        return None
    base = 1024 if binary_mark else 1000
    exponent = " KMGT".index((unit or " ").upper())
    return int(Fraction(number) * base**exponent)
