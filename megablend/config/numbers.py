"""Validation of integers that are passed to the Python API."""

from __future__ import annotations

import operator
from typing import Any

from megablend.errors import ConfigError

_TOO_LONG = 10**100
"""Integers from this value on are rejected. Python refuses to print integers of more than 4,300
digits, such as the product of several numbers."""


def whole_number(name: str, value: Any, *, least: int | None = None) -> int:
    """Return `value` as an int. Any integer type is accepted, such as numpy's; booleans and strings
    are refused.

    Raises: ConfigError if `value` is not a whole number, is less than `least`, or is too long for
        messages.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is not None and abs(number) >= _TOO_LONG:
        raise ConfigError(f"found {name} of more than 100 digits, expected a smaller number")
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        bound = "" if least is None else f", {least} or more"
        raise ConfigError(f"found {name} {value!r}, expected a whole number{bound}")
    return number
