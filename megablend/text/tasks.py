"""Tasks: the parts of text files that processes tokenise.

The division of a text file into tasks depends on that file alone, not on the processes or on other
files.
"""

from __future__ import annotations

from dataclasses import dataclass

from megablend.storage.base import Storage
from megablend.text.documents import TextFields
from megablend.text.parts import Part
from megablend.text.tables import TableFile, is_table
from megablend.text.text_file import TextFile

PART_BYTES = 256 << 20
"""The size of a part in bytes of uncompressed text. The bytes of token files depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The unit of work that is given to a process: one part of a text file, or all parts of a
    compressed file. It can be pickled."""

    file: TextFile
    part: int | None
    """The number of the part; None for all parts of a compressed file, one after the other."""
    groups: range = range(0)
    """The row groups of the part, if the file is a table."""
    cost: int
    """The approximate number of bytes of text to tokenise."""
    source: int = 0
    """The number of the source."""
    done: tuple[Part, ...] = ()
    """The parts whose token files were already made from this version of the text."""
    twins: tuple[str, ...] = ()
    """The names of token files that may have been made from the same lines. If there are such
    files, the text is hashed before it is tokenised."""


def plan_tasks(
    file: TextFile, storage: Storage, fields: TextFields, part_bytes: int = PART_BYTES
) -> list[Task]:
    """Divide a text file into tasks. Only tables are opened. Raises: the same errors as
    TableFile."""
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
