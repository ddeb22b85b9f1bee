"""Tables of files, with one row for each file. They are Arrow tables, which hold a listing of a
million files in a few arrays instead of a million objects.

    location  large_binary, the location of the file
    size      int64, its size in bytes
    etag      large_binary, see `FileStat.etag`

Texts are stored as bytes in UTF-8, in which surrogates are encoded like other characters. Arrow is
imported where it is used, since processes that find no files as tables do not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

from megablend.arrays import Bools, Int64s
from megablend.storage.base import Storage

FileTable: TypeAlias = Any
"""A table (pyarrow.Table) with the columns above."""
TextColumn: TypeAlias = Any
"""A column of texts (pyarrow.ChunkedArray of large_binary)."""
_ROWS = 10_000
"""The number of rows that are converted at a time."""
_ENCODING = ("utf-8", "surrogatepass")


def make_table(rows: Iterable[tuple[Any, ...]], names: Sequence[str]) -> FileTable:
    """Return a table of rows, whose values are texts and, in the column `size`, numbers."""
    import pyarrow as pa

    types = {"size": pa.int64()}
    schema = pa.schema([(name, types.get(name, pa.large_binary())) for name in names])
    parts = [schema.empty_table()]
    rows = iter(rows)
    while part := list(islice(rows, _ROWS)):
        columns = (
            column if name in types else [text.encode(*_ENCODING) for text in column]
            for name, column in zip(names, zip(*part, strict=True), strict=True)
        )
        parts.append(pa.table(list(columns), schema))
    return pa.concat_tables(parts)


def join_tables(parts: Sequence[FileTable]) -> FileTable:
    """Return the rows of tables with the same columns as one table."""
    import pyarrow as pa

    return pa.concat_tables(parts)


def list_texts(column: TextColumn, begin: int = 0, stop: int | None = None) -> list[str]:
    """Return the texts in the rows from `begin` to `stop`, by default in all rows."""
    import pyarrow as pa

    rows = column.slice(begin, None if stop is None else stop - begin)
    texts = list[str]()
    # Some rows at a time, so that few texts are in memory twice
    for first in range(0, len(rows), _ROWS):
        part = rows.slice(first, _ROWS)
        try:
            texts += part.cast(pa.large_string()).to_pylist()
        except pa.ArrowInvalid:  # surrogates
            texts += [str(scalar_bytes, *_ENCODING) for scalar_bytes in part.to_pylist()]
    return texts


def find_texts(column: TextColumn, expression: str) -> Bools:
    """Return whether each text contains bytes that match a regular expression (bool [n])."""
    from pyarrow import compute as pc

    matches: Bools = pc.match_substring_regex(column, expression).to_numpy()
    return matches


def count_bytes(column: TextColumn) -> Int64s:
    """Return the number of bytes of each text (int64 [n])."""
    from pyarrow import compute as pc

    counts: Int64s = pc.binary_length(column).to_numpy()
    return counts


def drop_bytes(column: TextColumn, count: int) -> TextColumn:
    """Return a column of the texts without their first `count` bytes."""
    from pyarrow import compute as pc

    return pc.binary_replace_slice(column, 0, count, b"")


def release_memory() -> None:
    """Give the memory of tables that are no longer used back to the system."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


class TableStorage(Storage, Protocol):
    """A storage that lists files as a table."""

    def find_table(self, pattern: str) -> FileTable | None:
        """Return a table of the files that match `pattern`, in any order; None if `find` and `stat`
        have to be called instead. Other calls do not use the sizes and etags in the table.

        Raises: the same errors as Storage.find.
        """
        ...


def find_table(storage: Storage, pattern: str) -> FileTable | None:
    """Return the result of `TableStorage.find_table`; None if the storage is not a TableStorage."""
    find = getattr(storage, "find_table", None)
    return None if find is None else find(pattern)
