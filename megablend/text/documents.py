"""Documents of text as they are read, and those that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_PLACES = 5
"""Places of bad documents that are recorded, of each kind."""
REMEDY = "mend it, or leave such documents out with `on_bad_document: skip`"


class Place(NamedTuple):
    """Where a document of a part is."""

    offset: int
    """Its line's first byte in the uncompressed file; of a table, the row number."""
    line: int
    """Its line within the part, from 0; of a table, the row."""


class Document(NamedTuple):
    """A document that was read."""

    text: str
    key: str | None
    place: Place


class BadDocument(NamedTuple):
    """A document that cannot be read, and why."""

    kind: str
    """A few words that are the same for all of the kind."""
    reason: str
    place: Place


@dataclass(slots=True)
class BadCounts:
    """Numbers of bad documents by kind, with the first places of each."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[list[Any]]] = field(default_factory=dict)
    """[offset, line, reason] each."""

    def add(self, bad: BadDocument) -> None:
        """Count a document."""
        self.counts[bad.kind] = self.counts.get(bad.kind, 0) + 1
        places = self.places.setdefault(bad.kind, [])
        if len(places) < MAX_PLACES:
            places.append([*bad.place, bad.reason])

    @property
    def total(self) -> int:
        """Number of all of them."""
        return sum(self.counts.values())

    def record(self) -> dict[str, Any]:
        """As JSON, sorted."""
        return {
            kind: {"count": count, "first": self.places[kind]}
            for kind, count in sorted(self.counts.items())
        }


class Portion(NamedTuple):
    """Consecutive documents of a part."""

    documents: list[Document]
    bad: list[BadDocument]
    num_bytes: int
    """Of the uncompressed text file that they take."""
    num_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFields:
    """Which parts of a line, or columns of a table, are read."""

    text: str
    key: str | None
    max_bytes: int
    """Longest line, or text of a table."""


def find_nested(record: Mapping[str, Any], dotted: str) -> Any:
    """A value by its dotted name. Raises: KeyError, with the name that is missing."""
    value: Any = record
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(name)
        value = value[name]
    return value
