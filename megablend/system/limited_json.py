"""Parsing untrusted JSON, with a limit on nesting, so that code that walks through it does not overflow the stack."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Maximum nesting of lists and objects; files of megablend need fewer than ten levels."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises: ValueError if it is not JSON, or nested more than MAX_DEPTH deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    opened = text.count("{") + text.count("[") if isinstance(text, str) else text.count(b"{") + text.count(b"[")
    if opened <= MAX_DEPTH:
        return value
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _items(each) if isinstance(item, dict | list)]
        if not level:
            return value
    raise _too_deep()


def missing_field(value: object, fields: Mapping[str, type | tuple[type, ...]]) -> str | None:
    """The first of `fields` (name -> type) that is missing from an object, or has another type; None if all are valid."""
    if not isinstance(value, dict):
        return "the structure of an object"
    for name, kind in fields.items():
        if name not in value or not isinstance(value[name], kind) or (kind is int and isinstance(value[name], bool)):
            return name
    return None


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _too_deep() -> ValueError:
    return ValueError(f"lists or objects nested more than {MAX_DEPTH} deep")
