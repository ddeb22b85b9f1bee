"""Parsers for values of settings that a user writes under `storage`. They raise ValueError with the
value that was found and what was expected; `read_settings` adds the name of the setting."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from megablend.storage.location import find_scheme

_SIZE = re.compile(r"\s*([0-9.e+_]+)\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE)
_MAX_DIGITS = 100
"""The maximum number of digits of a size: a typing error such as 1e999999999 would be computed
digit by digit."""


def parse_text(value: object) -> str:
    """Parse a path or a text that is not empty. A URL must not contain a user or password."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"found {value!r}, expected text")
    if "@" in text.partition("://")[2]:  # also after a slash, which a password may have
        raise ValueError(
            "contains a user or password; set it in the environment (HTTPS_PROXY for a proxy)"
        )
    return text


def parse_local_path(value: object) -> str:
    """Parse a path on this machine. The path is returned unchanged."""
    path = parse_text(value)
    if find_scheme(path):
        raise ValueError(f"found {value!r}, expected a path on this machine, without a scheme")
    return path


def text_that(is_valid: Callable[[str], object], expected: str) -> Callable[[object], str]:
    """Return a parser for a text that `is_valid` accepts.

    Args:
        expected: a description of valid texts, for messages.
    """

    def parse(value: object) -> str:
        text = parse_text(value)
        if not is_valid(text):
            raise ValueError(f"found {value!r}, expected {expected}")
        return text

    return parse


def list_of(
    parse_item: Callable[[object], str], expected: str
) -> Callable[[object], tuple[str, ...]]:
    """Return a parser for a list of at least one item."""

    def parse(value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"found {value!r}, expected a list of {expected}")
        return tuple(map(parse_item, value))

    return parse


def parse_number(value: object, unit: str) -> int | float:
    """Parse a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"found {value!r}, expected a number above 0 ({unit})")
    return value


def parse_whole(value: object, unit: str) -> int:
    """Parse a whole number above 0. It may be written as 1e9 or 2.0."""
    number = parse_number(value, unit)
    if number != int(number):
        raise ValueError(f"found {value!r}, expected a whole number")
    return int(number)


def parse_size(value: object, *, minimum: int = 1) -> int:
    """Parse a size such as 512MiB, 1.5 GB or 4e9. Returns: the number of bytes, rounded down."""
    size = None if isinstance(value, bool) else _read_size(str(value))
    if size is None:
        raise ValueError(f"found {value!r}, expected a size such as 512MiB")
    if size < minimum:
        least = "more than 0" if minimum == 1 else f"at least {minimum} bytes"
        raise ValueError(f"found {value!r}, expected {least}")
    return size


def _read_size(text: str) -> int | None:
    """Return the number of bytes of a size such as `1.5 GB`; None if the text is not a size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    digits, unit, binary_mark = match.groups()
    try:
        number = Decimal(digits.replace("_", ""))
    except InvalidOperation:
        return None
    if number.adjusted() > _MAX_DIGITS:
        return None
    base = 1024 if binary_mark else 1000
    exponent = " KMGT".index((unit or " ").upper())
    return int(Fraction(number) * base**exponent)
