"""Parts: what is tokenised by one process to one file. They are a function of the text file
alone, not of the processes, nor of other files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from megablend.storage.base import Storage
from megablend.text.documents import Portion, TextFields
from megablend.text.lines import CODECS, LineParser, LineReader, open_compressed, open_plain
from megablend.text.tables import ARROW, PARQUET, TableFile

PART_BYTES = 256 << 20
"""Uncompressed bytes of text of a part. Token files depend on it."""
SUFFIXES = tuple(
    name + packed for name in (".jsonl", ".ndjson", ".json") for packed in ("", *CODECS)
)
ALL_SUFFIXES = (*SUFFIXES, *PARQUET, *ARROW)


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
    def is_table(self) -> bool:
        """Whether it is Parquet or Arrow."""
        return self.path.lower().endswith((*PARQUET, *ARROW))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process does at a time: one part of a file, or all of one that is compressed."""

    file: TextFile
    part: int | None
    """None: all parts of a compressed file, one after the other."""
    groups: range = range(0)
    """Of a table: its row groups."""
    cost: int
    """Bytes of text, roughly."""


def plan_tasks(
    file: TextFile, storage: Storage, fields: TextFields, part_bytes: int = PART_BYTES
) -> list[Task]:
    """The tasks of a file; only of tables is anything read. Raises: as TableFile does."""
    if file.is_table:
        table = TableFile(storage, file.path, file.size, fields)
        plans = table.plan(part_bytes)
        return [
            Task(
                file=file,
                part=i,
                groups=groups,
                cost=max(table.count_bytes(groups), file.size // len(plans)),
            )
            for i, groups in enumerate(plans)
        ]
    if file.codec is not None:
        return [Task(file=file, part=None, cost=4 * file.size)]
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
        """First byte of its first line; of a table, its first row."""
        self.stop = start
        """The byte after its last line; of a table, the row after its last."""
        self.num_lines = 0
        self.digest = ""
        """Of its lines."""
        self.portions: Iterator[Portion] = iter(())


def open_parts(
    task: Task, storage: Storage, fields: TextFields, part_bytes: int = PART_BYTES
) -> Iterator[OpenPart]:
    """The parts of a task, in order: of each, all `portions` must be taken before the next."""
    file = task.file
    if file.is_table:
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
        reader = LineReader(
            open_plain(storage, file.path, file.size, begin), begin, fields.max_bytes
        )
        if start:
            reader.pass_line()
        yield _open_part(reader, parser, task.part, start + part_bytes)
        return
    assert file.codec is not None
    pieces = open_compressed(storage, file.path, file.size, file.codec)
    reader = LineReader(pieces, 0, fields.max_bytes)
    number = 0
    while number * part_bytes < max(1, reader.offset) or not reader.at_end():
        yield _open_part(reader, parser, number, (number + 1) * part_bytes)
        number += 1


def _open_part(reader: LineReader, parser: LineParser, number: int, stop: int) -> OpenPart:
    reader.digest = blake2b(digest_size=16)
    part = OpenPart(number, reader.offset)
    part.portions = _read_lines(reader, parser, part, stop)
    return part


def _read_lines(
    reader: LineReader, parser: LineParser, part: OpenPart, stop: int
) -> Iterator[Portion]:
    while (lines := reader.read(stop)) is not None:
        portion = parser.parse(lines, part.num_lines)
        part.num_lines += portion.num_lines
        yield portion
    part.stop = reader.offset
    part.digest = reader.digest.hexdigest()


def _read_table(table: TableFile, groups: range, part: OpenPart) -> Iterator[Portion]:
    digest = blake2b(digest_size=16)
    for portion in table.read(groups, digest):
        part.num_lines += portion.num_lines
        yield portion
    part.stop = part.start + part.num_lines
    part.digest = digest.hexdigest()


def count_lines_before(file: TextFile, storage: Storage, offset: int) -> int:
    """How many lines of a file end before a byte of its uncompressed text."""
    if file.codec is None:
        pieces = open_plain(storage, file.path, file.size, 0)
    else:
        pieces = open_compressed(storage, file.path, file.size, file.codec)
    lines = 0
    for piece in pieces:
        lines += piece.count(b"\n", 0, min(offset, len(piece)))
        offset -= len(piece)
        if offset <= 0:
            break
    return lines
