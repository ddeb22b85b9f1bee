"""Parsing untrusted JSON, with a limit on nesting, so that code that walks through it does not
overflow the stack."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

MAX_DEPTH = 64
"""Maximum nesting of lists and objects; files of megablend need fewer than ten levels."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises: ValueError if it is not JSON, or nested more than MAX_DEPTH
    deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    opened = (
        text.count("{") + text.count("[")
        if isinstance(text, str)
        else text.count(b"{") + text.count(b"[")
    )
    if opened <= MAX_DEPTH:
        return value
    level = [value] if type(value) in _NESTED else []
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _items(each) if type(item) in _NESTED]
        if not level:
            return value
    raise _too_deep()


def missing_field(value: object, fields: Mapping[str, type | tuple[type, ...]]) -> str | None:
    """The first of `fields` (name -> type) that is missing from an object, or has another type;
    None if all are valid."""
    if not isinstance(value, dict):
        return "the structure of an object"
    for name, kind in fields.items():
        found = value.get(name, _MISSING)
        if type(found) is not kind and (not isinstance(found, kind) or isinstance(found, bool)):
            return name
    return None


_NESTED = frozenset([dict, list])
_MISSING = object()


def _items(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value


def _too_deep() -> ValueError:
    return ValueError(f"lists or objects nested more than {MAX_DEPTH} deep")
