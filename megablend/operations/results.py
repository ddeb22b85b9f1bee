"""The base of all results of megablend: frozen attributes, a dict for JSON, a short `repr`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from html import escape
from typing import Any, ClassVar

_PLAIN = frozenset({str, int, float, bool})
"""Types of values that JSON also has."""
_WIDTH = 100
"""Number of characters in a line of a `repr`."""
_SHORT = 60
"""Maximum number of characters of a value in a `repr`."""
_LINES = 5
"""Maximum number of lines of a `repr`."""
_JOINED = "\0"
"""A placeholder for a space at which a line must not be broken."""
_LISTED = 20
"""Maximum number of items of a list that the HTML of a result shows."""


class Record:
    """Base class of the frozen dataclasses that functions of megablend return. It provides the dict
    that `--json` prints, and the HTML that notebooks show. Both leave out a field that has its
    default value, if this is None or an empty tuple."""

    __slots__ = ()

    OLD_KEYS: ClassVar[Mapping[str, str]] = {}
    """Keys of release 0.1.0 that the dict still contains, each with the name of the attribute that
    has its value."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as `--json` prints it: dicts, lists, strings and numbers."""
        values = {name: _to_json(value) for name, value in self._shown().items()}
        return values | {old: values[new] for old, new in self.OLD_KEYS.items() if new in values}

    def _has(self, field: Field[Any]) -> bool:
        """Return whether a field is a key of the dict."""
        return field.default is MISSING or getattr(self, field.name) not in (None, ())

    def _shown(self) -> dict[str, Any]:
        """Return the attributes that the dict contains, as a dict from name to value."""
        # Subclasses are dataclasses
        names = [field.name for field in fields(self) if self._has(field)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        items = [
            f"{name}={_shorten(value)}".replace(" ", _JOINED)
            for name, value in self._shown().items()
        ]
        text = f"{type(self).__name__}({', '.join(items)})"
        lines = textwrap.wrap(
            text,
            _WIDTH,
            subsequent_indent="    ",
            max_lines=_LINES,
            break_on_hyphens=False,
            break_long_words=False,
        )
        return "\n".join(lines).replace(_JOINED, " ")

    def _repr_html_(self) -> str:
        """Return the result as notebooks show it."""
        return f"<b>{type(self).__name__}</b>{_to_html(self)}"


def _to_json(value: Any) -> Any:
    """Convert the value of an attribute to values that JSON can represent."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value


def _shorten(value: Any) -> str:
    """Return a value as a `repr` shows it: records by type, tuples of records by length."""
    if isinstance(value, Mapping) and not isinstance(value, Record):
        text = "{" + ", ".join(map(str, value)) + "}"
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        text = f"<{len(value):,} of {type(value[0]).__name__}>"
    else:
        text = f"<{type(value).__name__}>" if is_dataclass(value) else repr(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _to_html(value: Any) -> str:
    """Return a value as HTML: a record as a table of its attributes, a tuple of records as a table
    with a row for each."""
    if isinstance(value, Record):
        value = value._shown()
    if isinstance(value, Mapping):
        rows = [(escape(str(key)), _to_html(item)) for key, item in value.items()]
    elif isinstance(value, tuple) and value and all(isinstance(item, Record) for item in value):
        return _records_to_html(value)
    else:
        return escape(value if isinstance(value, str) else _shorten(value))
    return (
        "<table>"
        + "".join(f"<tr><th>{key}</th><td>{cell}</td></tr>" for key, cell in rows)
        + "</table>"
    )


def _records_to_html(records: Sequence[Record]) -> str:
    """Return a table with a row for each record."""
    shown = [record._shown() for record in records[:_LISTED]]
    keys = list(dict.fromkeys(key for row in shown for key in row))
    head = "".join(f"<th>{escape(key)}</th>" for key in keys)
    body = "".join(
        "<tr>" + "".join(f"<td>{_to_html(row.get(key, ''))}</td>" for key in keys) + "</tr>"
        for row in shown
    )
    more = f"<p>and {len(records) - _LISTED:,} more</p>" if len(records) > _LISTED else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"
