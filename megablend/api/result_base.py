"""What all results of megablend have in common: frozen attributes, a dict for JSON, and the dict access of release 0.1.0."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

_PLAIN = frozenset({str, int, float, bool})
"""Types of values that are JSON as they are."""


class Result(Mapping[str, Any]):
    """Base of the frozen dataclasses that functions of megablend return.

    Use the attributes. Release 0.1.0 returned dicts, so for one more release a result also reads like one: `result["key"]`,
    `result.keys()`, `in`, `==`. Lists are then lists, as in JSON. A renamed key still works, with a
    DeprecationWarning.
    """

    __slots__ = ()
    OLD_NAMES: ClassVar[Mapping[str, str]] = {}
    """Old key -> attribute that replaces it."""
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    """Keys that are absent from the dict where the attribute is None."""

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints: dicts, lists, strings and numbers, with renamed keys under their old names too."""
        values = {key: _to_json(getattr(self, key)) for key in self}
        return values | {old: values[new] for old, new in self.OLD_NAMES.items() if new in values}

    def __iter__(self) -> Iterator[str]:
        for name in _list_fields(type(self)):
            if name not in self.OPTIONAL or getattr(self, name) is not None:
                yield name

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
        """The attribute of a key or old attribute, with a warning where it was renamed."""
        if key not in self.OLD_NAMES:
            return key
        warnings.warn(
            f"{key!r} of {type(self).__name__} is now called {self.OLD_NAMES[key]!r}; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=3,
        )
        return self.OLD_NAMES[key]


@cache
def _list_fields(cls: type[Result]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]  # subclasses are dataclasses


def _to_json(value: Any) -> Any:
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Result):
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
