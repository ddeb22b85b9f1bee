"""Documents of text as they are read, and those that cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

REMEDY = "fix it, or leave such documents out with `on_bad_document: skip`"


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

    def refuse_long(self, size: int, place: Place) -> BadDocument:
        """The document of a line, or text of a table, of more than `max_bytes`."""
        reason = f"is {size:,} bytes long, more than max_document ({self.max_bytes:,})"
        return BadDocument("too long", reason, place)
