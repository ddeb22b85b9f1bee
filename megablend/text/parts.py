"""Records of tokenised text: one for each part, which has a token file, and one for each text
file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megablend.text.documents import BadDocument

MAX_PLACES = 5
"""The number of bad documents of each kind of which a part records the places."""


@dataclass(slots=True, kw_only=True)
class Part:
    """A part that was tokenised. The record of its source and the footer of its token file hold
    the fields under these names."""

    number: int
    name: str = ""
    """The name of its token file."""
    start: int
    """The offset of the first byte of its first line; for a table, its first row."""
    stop: int = 0
    """The offset of the byte after its last line; for a table, the row after its last row."""
    lines: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """The size of its documents in UTF-8."""
    special: int = 0
    """The number of documents that contain the text of a special token."""
    unkeyed: int = 0
    """The number of documents that lack the key that the source names."""
    bad: dict[str, Any] = field(default_factory=dict)
    """For each kind of bad document: `count`, and `first`, [offset, line, reason] of the first
    MAX_PLACES of them."""
    difference: str = ""
    """A note on the place where gigatoken's tokens differed from those of `tokenizers`, which then
    tokenised the part; "" if gigatoken was not used, or gave the same tokens."""

    def add_bad(self, bad: BadDocument) -> None:
        """Count a document that was left out."""
        same_kind = self.bad.setdefault(bad.kind, {"count": 0, "first": []})
        same_kind["count"] += 1
        if same_kind["count"] <= MAX_PLACES:
            same_kind["first"].append([*bad.place, bad.reason])
        # Token files are the same bytes in whichever order the kinds were first seen
        self.bad = dict(sorted(self.bad.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A text file in its source's record: tokenised in full or in part, or unreadable."""

    size: int
    etag: str
    parts: tuple[Part, ...] = ()
    """The parts that are tokenised, in ascending order."""
    unreadable: str = ""
    """The reason why it was left out; "" if it was not."""
