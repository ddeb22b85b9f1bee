"""JSON from files that anyone may have written: nested no deeper than code that walks through it can bear."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Of lists and objects in one another; no file of megablend needs ten."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises: ValueError where it is not JSON, or nested more than MAX_DEPTH deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _items(each) if isinstance(item, dict | list)]
        if not level:
            return value
    raise _too_deep()


def missing_field(value: object, fields: Mapping[str, type | tuple[type, ...]]) -> str | None:
    """The first of `fields` (name -> type) that an object lacks, or has in another type; None where it has them all."""
    if not isinstance(value, dict):
        return "that it is an object"
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
