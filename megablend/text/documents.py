"""Documents that were read from text, and documents that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int64s

REMEDY = "fix it, or leave such documents out with `on_bad_document: skip`"


class Place(NamedTuple):
    """The position of a document in a text file."""

    offset: int
    """The offset of the document's line in the uncompressed file; for a table, the number of the
    document's row."""
    line: int
    """The number of the document's line within the part, from 0; for a table, the number of its row
    within the part."""


class Document(NamedTuple):
    """A document that was read."""

    text: str
    key: str | None
    place: Place


class BadDocument(NamedTuple):
    """A document that cannot be read, with the reason."""

    kind: str
    """The kind of error in a few words, which are the same for all documents with this kind of
    error."""
    reason: str
    place: Place


class Portion(NamedTuple):
    """Consecutive documents of a part. The n documents that could be read are stored as columns,
    since making an object for each document would take longer than reading it."""

    texts: list[str]
    keys: list[str | None]
    offsets: Int64s
    """The `Place.offset` of each document (int64 [n])."""
    lines: Int64s
    """The `Place.line` of each document (int64 [n])."""
    bad: list[BadDocument]
    num_bytes: int
    """The number of bytes of uncompressed text that were read, including those of bad documents."""
    num_lines: int

    @classmethod
    def gather(
        cls, results: Sequence[Document | BadDocument], num_bytes: int, num_lines: int
    ) -> Portion:
        """Return a portion of documents that were read one by one."""
        documents = [result for result in results if isinstance(result, Document)]
        bad = [result for result in results if isinstance(result, BadDocument)]
        return cls(
            [document.text for document in documents],
            [document.key for document in documents],
            np.array([document.place.offset for document in documents], np.int64),
            np.array([document.place.line for document in documents], np.int64),
            bad,
            num_bytes,
            num_lines,
        )

    def take_first(self, num: int) -> Portion:
        """Return a copy of the portion with only the first `num` documents. The other fields are
        unchanged."""
        return self._replace(
            texts=self.texts[:num],
            keys=self.keys[:num],
            offsets=self.offsets[:num],
            lines=self.lines[:num],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFields:
    """The names of the text and the key in each line (or the columns of a table), and the maximum
    size of a document."""

    text: str
    key: str | None
    max_bytes: int
    """The maximum size in bytes of a line, or of a text in a table."""

    def refuse_long(self, size: int, place: Place) -> BadDocument:
        """Return the BadDocument for a line, or a text in a table, of more than `max_bytes`."""
        reason = f"is {size:,} bytes long, more than max_document ({self.max_bytes:,})"
        return BadDocument("too long", reason, place)


def count_bytes(texts: Iterable[str]) -> int:
    """Return the total size of texts in UTF-8, in bytes."""
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
