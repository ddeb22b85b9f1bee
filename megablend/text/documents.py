"""Documents of text as they are read, and those that cannot be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s

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
    """Consecutive documents of a part: of the n that were read, columns, since an object for each
    would take longer than reading it."""

    texts: list[str]
    keys: list[str | None]
    offsets: Int64s
    """int64 [n], see `Place`"""
    lines: Int64s
    """int64 [n], see `Place`"""
    bad: list[BadDocument]
    num_bytes: int
    """Of the uncompressed text file that they take."""
    num_lines: int

    @classmethod
    def gather(
        cls, found: Iterable[Document | BadDocument], num_bytes: int, num_lines: int
    ) -> Portion:
        """Of documents that were read one by one."""
        documents = list[Document]()
        bad = list[BadDocument]()
        for each in found:
            if isinstance(each, Document):
                documents.append(each)
            else:
                bad.append(each)
        return cls(
            [each.text for each in documents],
            [each.key for each in documents],
            np.array([each.place.offset for each in documents], np.int64),
            np.array([each.place.line for each in documents], np.int64),
            bad,
            num_bytes,
            num_lines,
        )

    def take_first(self, num: int) -> Portion:
        """Its first documents."""
        return self._replace(
            texts=self.texts[:num],
            keys=self.keys[:num],
            offsets=self.offsets[:num],
            lines=self.lines[:num],
        )


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


def count_bytes(texts: Iterable[str]) -> int:
    """Bytes of texts in UTF-8."""
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
