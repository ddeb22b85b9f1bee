"""Parts: what is tokenised by one process to one file. They are a function of the text file
alone, not of the processes, nor of other files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from megablend.storage.base import Storage
from megablend.text.documents import BadDocument, Portion, TextFields
from megablend.text.lines import (
    CODECS,
    LineParser,
    LineReader,
    Piece,
    open_compressed,
    open_plain,
)
from megablend.text.tables import ARROW, PARQUET, TableFile, is_table

PART_BYTES = 256 << 20
"""Uncompressed bytes of text of a part. Token files depend on it."""
SUFFIXES = tuple(
    name + packed for name in (".jsonl", ".ndjson", ".json") for packed in ("", *CODECS)
)
ALL_SUFFIXES = (*SUFFIXES, *PARQUET, *ARROW)
MAX_PLACES = 5
"""Places of bad documents that are recorded, of each kind in a part."""


class TextFile(NamedTuple):
    """A file of text as it was found."""

    name: str
    """Relative to the source's root."""
    path: str
    size: int
    etag: str

    @property
    def codec(self) -> str | None:
        """How it is compressed; None if it is not."""
        return next(
            (codec for end, codec in CODECS.items() if self.path.lower().endswith(end)), None
        )

    @property
    def cost(self) -> int:
        """Bytes of its text, roughly."""
        return self.size * (4 if self.codec else 1)


@dataclass(slots=True, kw_only=True)
class Part:
    """What became of a part; kept in the record of its source, and in the token file's footer."""

    number: int
    name: str = ""
    """Of its token file."""
    start: int
    """First byte of its first line; of a table, its first row."""
    stop: int = 0
    """The byte after its last line; of a table, the row after its last."""
    lines: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of its documents."""
    special: int = 0
    """Documents in which the text of a special token occurs."""
    unkeyed: int = 0
    """Documents without the key that the source names."""
    bad: dict[str, Any] = field(default_factory=dict)
    """By kind, `count`, and `first`: [offset, line, reason] of the first ones."""
    difference: str = ""
    """Where gigatoken gave other tokens than `tokenizers`, which then tokenised the part."""

    def add_bad(self, bad: BadDocument) -> None:
        """Count a document that was left out."""
        found = self.bad.setdefault(bad.kind, {"count": 0, "first": []})
        found["count"] += 1
        if found["count"] <= MAX_PLACES:
            found["first"].append([*bad.place, bad.reason])
        self.bad = dict(sorted(self.bad.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A text file of which some or all parts are tokenised, or which cannot be read."""

    size: int
    etag: str
    parts: tuple[Part, ...] = ()
    """In order."""
    unreadable: str = ""
    """Why it was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process does at a time: one part of a file, or all of one that is compressed.
    Picklable."""

    file: TextFile
    part: int | None
    """None: all parts of a compressed file, one after the other."""
    groups: range = range(0)
    """Of a table: its row groups."""
    cost: int
    """Bytes of text, roughly."""
    source: int = 0
    """Number of the source."""
    done: tuple[Part, ...] = ()
    """Parts whose token files were made from this version of the text."""
    twins: tuple[str, ...] = ()
    """Token files that may be of the same lines: the text is then hashed first."""


def plan_tasks(
    file: TextFile, storage: Storage, fields: TextFields, part_bytes: int = PART_BYTES
) -> list[Task]:
    """The tasks of a file; only of tables is anything read. Raises: as TableFile does."""
    if is_table(file.path):
        table = TableFile(storage, file.path, file.size, fields)
        plans = table.plan(part_bytes)
        least = file.size // len(plans)
        return [
            Task(file=file, part=i, groups=groups, cost=max(table.count_bytes(groups), least))
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
    """A part that is being read: its documents, and, once all are read, what it consists of."""

    def __init__(self, number: int, start: int) -> None:
        self.number = number
        self.start = start
        """See `Part`."""
        self.stop = start
        """See `Part`."""
        self.num_lines = 0
        self.hash = blake2b(digest_size=16)
        self.portions: Iterator[Portion] = iter(())

    @property
    def digest(self) -> str:
        """Of its lines, or of its texts and keys."""
        return self.hash.hexdigest()

    def pass_over(self) -> None:
        """Read what was not read yet."""
        for _ in self.portions:
            pass


def open_parts(
    task: Task, storage: Storage, fields: TextFields, part_bytes: int = PART_BYTES
) -> Iterator[OpenPart]:
    """The parts of a task, in order: of each, all `portions` must be taken before the next."""
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
        # A line that begins at the part's first byte is its own: the byte before says
        begin = max(0, start - 1)
        reader = LineReader(_open(file, storage, begin), begin, fields.max_bytes)
        if start:
            reader.pass_line()
        yield _open_part(reader, parser, task.part, start + part_bytes)
        return
    reader = LineReader(_open(file, storage), 0, fields.max_bytes)
    number = 0
    while number * part_bytes < max(1, reader.offset) or not reader.at_end():
        yield _open_part(reader, parser, number, (number + 1) * part_bytes)
        number += 1


def _open(file: TextFile, storage: Storage, start: int = 0) -> Iterator[Piece]:
    """The bytes of a file's text, of one that is not compressed from `start` on."""
    if file.codec is None:
        return open_plain(storage, file.path, file.size, start)
    return open_compressed(storage, file.path, file.size, file.codec)


def _open_part(reader: LineReader, parser: LineParser, number: int, stop: int) -> OpenPart:
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
    """How many lines of a file end at bytes [start, stop) of its uncompressed text."""
    at = 0 if file.codec is not None else start
    ends = 0
    for piece in _open(file, storage, at):
        ends += bytes(piece[max(0, start - at) : max(0, stop - at)]).count(b"\n")
        at += len(piece)
        if at >= stop:
            break
    return ends
