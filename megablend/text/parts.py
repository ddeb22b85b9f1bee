"""Parts: each is tokenised by one process to one token file. How a text file is divided depends on
that file alone, not on the processes or on other files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from megablend.storage.base import Storage
from megablend.text.documents import BadDocument, Portion, TextFields
from megablend.text.lines import CODECS, LineParser, LineReader, Piece, open_compressed, open_plain
from megablend.text.tables import ARROW, PARQUET, TableFile, is_table

PART_BYTES = 256 << 20
"""The uncompressed bytes of text in a part. Token files depend on it."""
LINE_SUFFIXES = tuple(
    name + packed for name in (".jsonl", ".ndjson", ".json") for packed in ("", *CODECS)
)
ALL_SUFFIXES = (*LINE_SUFFIXES, *PARQUET, *ARROW)
MAX_PLACES = 5
"""The number of bad documents of each kind whose places a part records."""
_COMPRESSION = 4
"""A usual ratio for text; only tasks' costs and estimates depend on it."""


class TextFile(NamedTuple):
    """A file of text as it was found."""

    name: str
    """Relative to the source's root."""
    path: str
    size: int
    etag: str

    @property
    def codec(self) -> str | None:
        """The compression of the file; None if it is not compressed."""
        for suffix, codec in CODECS.items():
            if self.path.lower().endswith(suffix):
                return codec
        return None

    @property
    def cost(self) -> int:
        """The bytes of its text, roughly."""
        return self.size * (_COMPRESSION if self.codec else 1)


@dataclass(slots=True, kw_only=True)
class Part:
    """A part that was tokenised. The record of its source and the footer of its token file hold
    the fields under these names."""

    number: int
    name: str = ""
    """The name of its token file."""
    start: int
    """The first byte of its first line; for a table, its first row."""
    stop: int = 0
    """The byte after its last line; for a table, the row after its last."""
    lines: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """The bytes of its documents in UTF-8."""
    special: int = 0
    """The number of documents in which the text of a special token occurs."""
    unkeyed: int = 0
    """The number of documents without the key that the source names."""
    bad: dict[str, Any] = field(default_factory=dict)
    """For each kind of bad document, `count`, and `first`: [offset, line, reason] of the first
    MAX_PLACES of them."""
    difference: str = ""
    """The place where gigatoken's tokens differed from those of `tokenizers`, which then tokenised
    the part; "" if gigatoken was not used, or gave the same tokens."""

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
    """A text file in the record of its source: tokenised in some or all parts, or unreadable."""

    size: int
    etag: str
    parts: tuple[Part, ...] = ()
    """The parts that are tokenised, in order."""
    unreadable: str = ""
    """The reason why it was left out; "" if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The work that one process does at a time. Picklable."""

    file: TextFile
    part: int | None
    """The number of the part; None for all parts of a compressed file, one after the other."""
    groups: range = range(0)
    """The row groups of the part, if the file is a table."""
    cost: int
    """The bytes of text, roughly."""
    source: int = 0
    """The number of the source."""
    done: tuple[Part, ...] = ()
    """The parts whose token files were made from this version of the text."""
    twins: tuple[str, ...] = ()
    """The names of token files that may have been made from the same lines. If there are any, the
    text is hashed before it is tokenised."""


def plan_tasks(
    file: TextFile, storage: Storage, fields: TextFields, part_bytes: int = PART_BYTES
) -> list[Task]:
    """Return the tasks of a file. Only tables are opened. Raises: the same errors as TableFile."""
    if is_table(file.path):
        table = TableFile(storage, file.path, file.size, fields)
        plans = table.plan(part_bytes)
        min_cost = file.size // len(plans)  # if the sizes of groups are not recorded
        return [
            Task(file=file, part=i, groups=groups, cost=max(table.count_bytes(groups), min_cost))
            for i, groups in enumerate(plans)
        ]
    if file.codec is not None:
        return [Task(file=file, part=None, cost=file.cost)]
    num_parts = max(1, -(-file.size // part_bytes))
    return [
        Task(file=file, part=i, cost=min(part_bytes, file.size - i * part_bytes))
        for i in range(num_parts)
    ]


class OpenPart:
    """A part that is being read. `stop`, `num_lines` and `digest` cover the portions that have been
    taken: the whole part, once all have been."""

    def __init__(self, number: int, start: int) -> None:
        self.number = number
        self.start = start
        """See `Part.start`."""
        self.stop = start
        """See `Part.stop`."""
        self.num_lines = 0
        self.hash = blake2b(digest_size=16)
        self.portions: Iterator[Portion] = iter(())

    @property
    def digest(self) -> str:
        """The hash of its lines; for a table, of its texts and keys."""
        return self.hash.hexdigest()

    def pass_over(self) -> None:
        """Read the remaining portions for their digest only."""
        for _ in self.portions:
            pass


def open_parts(
    task: Task, storage: Storage, fields: TextFields, part_bytes: int = PART_BYTES
) -> Iterator[OpenPart]:
    """Open the parts of a task, in order: the portions of a part must all be taken before the next
    part is opened."""
    file = task.file
    if is_table(file.path):
        assert task.part is not None
        table = TableFile(storage, file.path, file.size, fields)
        part = OpenPart(task.part, table.row_of(task.groups))
        part.portions = _read_table(table, task.groups, part)
        yield part
        return
    parser = LineParser(fields)
    if task.part is not None:
        start = task.part * part_bytes
        # A line that begins at `start` belongs to this part: the byte before it, a line break, is
        # all that `pass_line` then passes
        begin = max(0, start - 1)
        reader = LineReader(_open(file, storage, begin), begin, fields.max_bytes)
        if start:
            reader.pass_line()
        yield _open_part(reader, parser, task.part, start + part_bytes)
        return
    reader = LineReader(_open(file, storage), 0, fields.max_bytes)
    number = 0
    # The uncompressed size is unknown: each `part_bytes` that are read make a part, which is empty
    # if no line begins in it
    while number * part_bytes < max(1, reader.offset) or not reader.at_end():
        yield _open_part(reader, parser, number, (number + 1) * part_bytes)
        number += 1


def _open(file: TextFile, storage: Storage, start: int = 0) -> Iterator[Piece]:
    """Read the uncompressed bytes of a file, from `start` on if it is not compressed."""
    if file.codec is None:
        return open_plain(storage, file.path, file.size, start)
    return open_compressed(storage, file.path, file.size, file.codec)


def _open_part(reader: LineReader, parser: LineParser, number: int, stop: int) -> OpenPart:
    """Open the part of the lines that begin before `stop`."""
    part = OpenPart(number, reader.offset)
    part.portions = _read_lines(reader, parser, part, stop)
    return part


def _read_lines(
    reader: LineReader, parser: LineParser, part: OpenPart, stop: int
) -> Iterator[Portion]:
    while (lines := reader.read(stop, part.hash)) is not None:
        portion = parser.parse(lines, part.num_lines)
        part.num_lines += portion.num_lines
        part.stop = reader.offset
        yield portion


def _read_table(table: TableFile, groups: range, part: OpenPart) -> Iterator[Portion]:
    for portion in table.read(groups, part.hash):
        part.num_lines += portion.num_lines
        part.stop += portion.num_lines
        yield portion


def count_line_ends(file: TextFile, storage: Storage, start: int, stop: int) -> int:
    """Return the number of lines that end at bytes [start, stop) of a file's uncompressed text."""
    position = 0 if file.codec is not None else start
    ends = 0
    for piece in _open(file, storage, position):
        in_range = piece[max(0, start - position) : max(0, stop - position)]
        ends += bytes(in_range).count(b"\n")
        position += len(piece)
        if position >= stop:
            break
    return ends
