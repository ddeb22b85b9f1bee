"""Records of tokenised text: one record for each part, which has a token file, and one for each
text file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megablend.text.documents import BadDocument

MAX_PLACES = 5
"""The maximum number of bad documents of each kind that a part records individually."""


@dataclass(slots=True, kw_only=True)
class Part:
    """A part that was tokenised. The record of its source and the footer of its token file store
    these fields under the same names."""

    number: int
    name: str = ""
    """The name of the part's token file."""
    start: int
    """The offset of the first byte of the part's first line; for a table, the number of the part's
    first row."""
    stop: int = 0
    """The offset of the byte after the part's last line; for a table, the number of the row after
    its last row."""
    lines: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """The size of the texts of the part's documents in UTF-8."""
    special: int = 0
    """The number of documents that contain the text of a special token."""
    unkeyed: int = 0
    """The number of documents that lack the key that the source names."""
    bad: dict[str, Any] = field(default_factory=dict)
    """The bad documents by kind. For each kind, `count` is their number, and `first` a list with
    [offset, line, reason] for the first MAX_PLACES of them."""
    difference: str = ""
    """A note if gigatoken gave other tokens than `tokenizers`, which then tokenised the part. It is
    "" if gigatoken was not used, or gave the same tokens."""

    def add_bad(self, bad: BadDocument) -> None:
        """Add a bad document, which was left out of the token file."""
        same_kind = self.bad.setdefault(bad.kind, {"count": 0, "first": []})
        same_kind["count"] += 1
        if same_kind["count"] <= MAX_PLACES:
            same_kind["first"].append([*bad.place, bad.reason])
        # Sorted, so that the bytes of token files do not depend on the order of the kinds
        self.bad = dict(sorted(self.bad.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A text file in the record of its source. It is tokenised completely or in part, or cannot be
    read."""

    size: int
    etag: str
    parts: tuple[Part, ...] = ()
    """The parts that are tokenised, in ascending order."""
    unreadable: str = ""
    """The reason why the file was left out; "" if it was not left out."""
