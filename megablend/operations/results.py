"""What all results of megablend have in common: frozen attributes, a dict for JSON, a short `repr`,
and the dict access of release 0.1.0."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

_PLAIN = frozenset({str, int, float, bool})
"""Types of values that are JSON as they are."""
_WIDTH = 100
"""Columns of a line of a `repr`."""
_SHORT = 60
"""Characters of a value in it."""
_LINES = 5
"""Lines of a `repr`."""
_JOINED = "\0"
"""Stands for a blank at which a line is not broken."""
_LISTED = 20
"""Items of a list that the HTML of a result shows."""


class Record:
    """Base of the frozen dataclasses that functions of megablend return: what `--json` prints of
    them, and notebooks show."""

    __slots__ = ()
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    """Keys that are absent from the dict if the attribute is None, or an empty tuple."""

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints: dicts, lists, strings and numbers."""
        return {name: _to_json(value) for name, value in self._shown().items()}

    def _has(self, name: str) -> bool:
        """Whether a field is a key of the dict."""
        return name not in self.OPTIONAL or getattr(self, name) not in (None, ())

    def _shown(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._keys()}

    def _keys(self) -> Iterator[str]:
        names = (field.name for field in fields(self))  # type: ignore[arg-type]  # subclasses are dataclasses
        return (name for name in names if self._has(name))

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
        """What notebooks show."""
        return f"<b>{type(self).__name__}</b>{_to_html(self)}"


class Result(Record, Mapping[str, Any]):
    """Base of results that also read like the dicts of release 0.1.0.

    Use the attributes. For one more release a result also reads like a dict: `result["key"]`,
    `result.keys()`, `in`, `==`. Lists are then lists, as in JSON. A renamed key still works, with a
    DeprecationWarning.
    """

    __slots__ = ()
    OLD_NAMES: ClassVar[Mapping[str, str]] = {}
    """Old key -> attribute that replaces it."""

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints: dicts, lists, strings and numbers,
        with renamed keys under their old names too."""
        values = Record.to_dict(self)
        return values | {old: values[new] for old, new in self.OLD_NAMES.items() if new in values}

    def __iter__(self) -> Iterator[str]:
        return self._keys()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return self.OLD_NAMES.get(key, key) in iter(self) if isinstance(key, str) else False

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return _as_lists(getattr(self, self._current_name(key)))

    if not TYPE_CHECKING:  # which would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name not in type(self).OLD_NAMES:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return getattr(self, self._current_name(name))

    def _current_name(self, key: str) -> str:
        """The attribute of a key or old attribute, with a warning if it was renamed."""
        if key not in self.OLD_NAMES:
            return key
        warnings.warn(
            f"{key!r} of {type(self).__name__} is now called {self.OLD_NAMES[key]!r}; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=3,
        )
        return self.OLD_NAMES[key]


def _to_json(value: Any) -> Any:
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _to_json(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_to_json(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value


def _as_lists(value: Any) -> Any:
    """The value with tuples as lists, as in release 0.1.0."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return {key: _as_lists(each) for key, each in value.items()}
    return value


def _shorten(value: Any) -> str:
    """A value in a few words: records by their type, lists of them by their length."""
    if isinstance(value, Mapping) and not isinstance(value, Record):
        text = "{" + ", ".join(map(str, value)) + "}"
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        text = f"<{len(value):,} of {type(value[0]).__name__}>"
    else:
        text = f"<{type(value).__name__}>" if is_dataclass(value) else repr(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _to_html(value: Any) -> str:
    """A record as a table of its attributes, records of one kind as a table with a row each."""
    if isinstance(value, Record):
        value = value._shown()
    if isinstance(value, Mapping):
        rows = [(escape(str(key)), _to_html(each)) for key, each in value.items()]
    elif isinstance(value, tuple) and value and all(isinstance(each, Record) for each in value):
        return _records_to_html(value)
    else:
        return escape(value if isinstance(value, str) else _shorten(value))
    return (
        "<table>"
        + "".join(f"<tr><th>{key}</th><td>{each}</td></tr>" for key, each in rows)
        + "</table>"
    )


def _records_to_html(records: Sequence[Record]) -> str:
    shown = [each._shown() for each in records[:_LISTED]]
    keys = list(dict.fromkeys(key for each in shown for key in each))
    head = "".join(f"<th>{escape(key)}</th>" for key in keys)
    body = "".join(
        "<tr>" + "".join(f"<td>{_to_html(each.get(key, ''))}</td>" for key in keys) + "</tr>"
        for each in shown
    )
    more = f"<p>and {len(records) - _LISTED:,} more</p>" if len(records) > _LISTED else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"
