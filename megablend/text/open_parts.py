"""Read the parts of a task, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from megablend.storage.base import Storage
from megablend.text.documents import Portion, TextFields
from megablend.text.line_parser import LineParser
from megablend.text.lines import LineReader
from megablend.text.tables import TableFile, is_table
from megablend.text.tasks import PART_BYTES, Task
from megablend.text.text_file import open_text


class OpenPart:
    """A part that is being read. `stop`, `num_lines` and `digest` cover the portions that have been
    read so far, so they are final after the last portion.

    Args:
        portions: the portions of the part.
        content: the hash of the part's content, which is updated while `portions` is read.
    """

    def __init__(
        self,
        number: int,
        start: int,
        portions: Iterator[Portion],
        content: blake2b,
        *,
        is_table: bool,
    ) -> None:
        self.number = number
        self.start = start
        """See `Part.start`."""
        self.stop = start
        """See `Part.stop`."""
        self.num_lines = 0
        self.portions = self._count(portions)
        self._content = content
        self._is_table = is_table

    @property
    def digest(self) -> str:
        """The digest of the lines of the part; for a table, of its texts and keys."""
        return self._content.hexdigest()

    def pass_over(self) -> None:
        """Read the remaining portions only to complete the digest."""
        for _ in self.portions:
            pass

    def _count(self, portions: Iterator[Portion]) -> Iterator[Portion]:
        for portion in portions:
            self.num_lines += portion.num_lines
            self.stop += portion.num_lines if self._is_table else portion.num_bytes
            yield portion


def open_parts(
    task: Task, storage: Storage, fields: TextFields, part_bytes: int = PART_BYTES
) -> Iterator[OpenPart]:
    """Yield the parts of a task. The caller must read all portions of a part before it requests the
    next part."""
    file = task.file
    if is_table(file.path):
        assert task.part is not None
        table = TableFile(storage, file.path, file.size, fields)
        content = blake2b(digest_size=16)
        portions = table.read(task.groups, content)
        yield OpenPart(task.part, table.row_of(task.groups), portions, content, is_table=True)
        return
    parser = LineParser(fields)
    if task.part is not None:
        start = task.part * part_bytes
        # A line that begins at `start` belongs to this part: `pass_line` then skips only the line
        # break before it
        begin = max(0, start - 1)
        reader = LineReader(open_text(file, storage, begin), begin, fields.max_bytes)
        if start:
            reader.pass_line()
        yield _open_lines(reader, parser, task.part, start + part_bytes)
        return
    reader = LineReader(open_text(file, storage), 0, fields.max_bytes)
    number = 0
    # The uncompressed size is unknown: each `part_bytes` that are read make a part, which is empty
    # if no line begins in it
    while number * part_bytes < max(1, reader.offset) or not reader.at_end():
        yield _open_lines(reader, parser, number, (number + 1) * part_bytes)
        number += 1


def _open_lines(reader: LineReader, parser: LineParser, number: int, stop: int) -> OpenPart:
    """Return the part with the lines that begin before the offset `stop`."""
    content = blake2b(digest_size=16)
    portions = _read_lines(reader, parser, stop, content)
    return OpenPart(number, reader.offset, portions, content, is_table=False)


def _read_lines(
    reader: LineReader, parser: LineParser, stop: int, content: blake2b
) -> Iterator[Portion]:
    num_lines = 0
    while (lines := reader.read(stop, content)) is not None:
        portion = parser.parse(lines, num_lines)
        num_lines += portion.num_lines
        yield portion
