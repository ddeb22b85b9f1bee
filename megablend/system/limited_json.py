"""Parse untrusted JSON with a limit on nesting, so that code that walks through it does not
overflow the stack."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

MAX_DEPTH = 64
"""The deepest allowed nesting of lists and objects; megablend's own files need fewer than ten
levels."""
_NESTED = frozenset([dict, list])
"""The types of parsed values that contain other values."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises: ValueError if it is not JSON, or nested more than MAX_DEPTH
    deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    num_brackets = (
        text.count("{") + text.count("[")
        if isinstance(text, str)
        else text.count(b"{") + text.count(b"[")
    )
    if num_brackets <= MAX_DEPTH:  # a value is nested at most this deep
        return value
    level = [value] if type(value) in _NESTED else []
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in _items(outer) if type(item) in _NESTED]
        if not level:
            return value
    raise _too_deep()


def fits(value: object, shape: Any) -> bool:
    """Return whether a parsed JSON value has the expected shape.

    Args:
        shape: the expected shape, which is one of these:
            a type, which must be exactly that of the value;
            a tuple of shapes, one of which the value has;
            `{name: shape}`, an object with at least these fields;
            `{str: shape}`, an object whose values all have the shape;
            `[shape]`, a list whose items all have the shape;
            a function that returns whether the value has the shape.
    """
    if isinstance(shape, type):
        return type(value) is shape
    if isinstance(shape, tuple):
        return any(map(fits, repeat(value), shape))
    if isinstance(shape, list):
        return type(value) is list and all(map(fits, value, repeat(shape[0])))
    if not isinstance(shape, dict):
        return bool(shape(value))
    if type(value) is not dict:
        return False
    if str in shape:
        return all(map(fits, value.values(), repeat(shape[str])))
    return shape.keys() <= value.keys() and all(map(fits, map(value.get, shape), shape.values()))


def missing_field(value: object, fields: Mapping[str, Any]) -> str | None:
    """Return the name of the first field that a parsed object lacks, or whose value has another
    shape; None if all fields are valid.

    Args:
        fields: the shape of each required field, as for `fits`.
    """
    if not isinstance(value, dict):
        return "the structure of an object"
    for name, shape in fields.items():
        if name not in value or not fits(value[name], shape):
            return name
    return None


def is_count(value: object) -> bool:
    """Return whether a value is a whole number, 0 or more."""
    return type(value) is int and value >= 0


def _items(value: Any) -> Iterable[Any]:
    """Return the items of a list, or the values of an object."""
    return value.values() if type(value) is dict else value


def _too_deep() -> ValueError:
    return ValueError(f"lists or objects nested more than {MAX_DEPTH} deep")
