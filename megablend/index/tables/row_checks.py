"""Checksums of single rows of a table, or of groups of rows, which are compared when the rows are
read.

    <snapshot>/blocks.check.arrow     uint32 `place` and `running`, one row for each row of blocks.arrow
    <snapshot>/chunks.check.arrow     uint32 `row`, one row for each row of chunks.arrow
    <documents>/groups.check.arrow    uint32 `group`, one row for 64 documents: see document_table.py

A checksum is computed from a row's number and values (`kernels.row_checks`). Running counts of
blocks are mostly read without the other columns, so they have a checksum of their own. The tables
of checksums are listed in the manifest. They are derived from the other tables, so they are not
part of the digest, and a cache of version 0.1.0 has none until it is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import DamagedCacheError
from megablend.index.tables.manifest import BLOCKS, CHUNKS, damaged_tables, read_manifest
from megablend.index.tables.mapped_table import MappedTable
from megablend.index.tables.table_folder import add_tables
from megablend.index.tables.tables import BLOCK_COLUMNS, CHUNK_COLUMNS, TableWriter
from megablend.kernels.row_checks import row_checks
from megablend.lazy import cached_property
from megablend.system.log import LOG

PLACE = ("chunk", "offset", "stored_bytes", "decoded_bytes", "encoding", "flags")
RUNNING = ("tokens_before", "rows_before", "ends_before")
_COLUMNS = {BLOCKS: BLOCK_COLUMNS, CHUNKS: CHUNK_COLUMNS}
_GROUPS = {BLOCKS: {"place": PLACE, "running": RUNNING}, CHUNKS: {"row": CHUNK_COLUMNS.names or ()}}
"""For each table, the names of its checksums, and the columns that each checksum covers."""
_CHECKS = {table: table.replace(".", ".check.") for table in _GROUPS}
"""For each table, the name of the table that contains its checksums."""
_CHECK_COLUMNS = {table: np.dtype([(name, "<u4") for name in _GROUPS[table]]) for table in _GROUPS}
"""For each table, the columns of its table of checksums."""
_PASS = 1 << 14
"""Number of rows whose checksums are computed at a time."""
_warned: set[Path] = set()
"""The folders about which `warn_unchecked` has warned."""


def find_wrong(checks: MappedTable, name: str, rows: Int64s, values: Int64s) -> int | None:
    """Return the first row that differs from its checksum, or None if there is none.

    Args:
        checks: the checksums of the table.
        name: name of the checksum.
        rows: int64 [n], numbers of the rows.
        values: int64 [num_columns, n], values of the columns that the checksum covers.
    """
    wrong = _compute(rows, values) != checks.take(name, rows)
    return int(rows[wrong.argmax()]) if wrong.any() else None


def write_checks(
    path: Path, columns: np.dtype[np.void], num_rows: int, read: Callable[[str, Int64s], Int64s]
) -> None:
    """Write the checksums of all rows of a table.

    Args:
        columns: the columns of the table of checksums, named after the checksums; all are uint32.
        read: a function that takes the name of a checksum and row numbers, int64 [n], and returns
            the values of the columns that the checksum covers, int64 [num_columns, n].
    """
    names = columns.names or ()
    with TableWriter(path, columns) as checks:
        for start in range(0, num_rows, _PASS):
            rows = np.arange(start, min(start + _PASS, num_rows))
            checks.append({name: _compute(rows, read(name, rows)) for name in names})
        checks.finish()


def _compute(rows: Int64s, values: Int64s) -> npt.NDArray[np.uint32]:
    """Compute the checksums of rows from their numbers, int64 [n], and their values, int64
    [num_columns, n] (uint32 [n])."""
    checks = np.empty(len(rows), np.uint32)
    row_checks(np.ascontiguousarray(rows).view(np.uint64), values.view(np.uint64), checks)
    return checks


class CheckedTable:
    """A memory-mapped table of a snapshot, whose rows are verified with checksums. It can be shared
    between threads, and used after a fork."""

    def __init__(self, folder: Path, table: str, *, checks: bool) -> None:
        """Open a table. `checks` says whether it has checksums; without checksums, rows are not
        verified."""
        self._folder = folder
        self._table = table
        self._path = f"{folder}/{table}"
        self._groups = _GROUPS[table]
        self._has_checks = checks
        self.mapped = MappedTable(self._path, _COLUMNS[table])
        self.num_rows = self.mapped.num_rows

    @cached_property
    def _checks(self) -> MappedTable | None:
        """The checksums of the rows, or None if the table has none."""
        if not self._has_checks:
            return None
        path = f"{self._folder}/{_CHECKS[self._table]}"
        checks = MappedTable(path, _CHECK_COLUMNS[self._table])
        if checks.num_rows != self.num_rows:
            raise DamagedCacheError.of(
                f"{path}: damaged table: its number of rows differs from that of {self._table}"
            )
        return checks

    def take(self, group: str, rows: Int64s) -> Int64s:
        """Read the columns that a checksum covers, and verify them.

        Args:
            group: name of the checksum.
            rows: int64 [n], valid row numbers in any order.

        Returns: int64 [num_columns, n].
        Raises: CacheError if a row differs from its checksum, or cannot be read.
        """
        names = self._groups[group]
        values = np.empty((len(names), len(rows)), np.int64)
        for number, name in enumerate(names):
            values[number] = self.mapped.take(name, rows)
        if len(rows) and self._checks is not None:
            wrong = find_wrong(self._checks, group, rows, values)
            if wrong is not None:
                raise DamagedCacheError.of(
                    f"{self._path}: damaged table: row {wrong} does not match its checksum in {_CHECKS[self._table]}"
                )
        return values

    def find_last(self, group: str, name: str, span: range, values: Int64s) -> Int64s:
        """Find, for each value, the last row of `span` at which an ascending column is at most that
        value.

        Args:
            group: name of the checksum that covers the column.
            name: name of the column.
            values: int64 [n], each at least the column's value at span.start, and less than at
                span.stop.

        Returns: int64 [n], row numbers.
        Raises: CacheError if one of these rows, or the row after it, differs from its checksum, or
            if the column is not ascending.
        """
        column = self.mapped[name][span.start : span.stop]
        rows = span.start + np.searchsorted(column, values, side="right").astype(np.int64) - 1
        rows = np.clip(rows, span.start, span.stop - 1)
        verified = self.take(group, np.concatenate((rows, rows + 1)))
        at_rows, after_rows = verified[self._groups[group].index(name)].reshape(2, -1)
        if ((at_rows > values) | (after_rows <= values)).any():
            raise DamagedCacheError.of(f"{self._path}: damaged table: its {name} is not ascending")
        return rows


def has_checks(manifest: Mapping[str, Any]) -> bool:
    """Return whether a snapshot, given its manifest, has checksums of rows."""
    return set(_CHECKS.values()) <= set(manifest["tables"])


def write_snapshot_checks(folder: Path, into: Path) -> None:
    """Compute the checksums of the tables in a snapshot's folder, and write them to the folder
    `into`."""
    for name, columns in _CHECK_COLUMNS.items():
        table = CheckedTable(folder, name, checks=False)
        write_checks(into / _CHECKS[name], columns, table.num_rows, table.take)


def complete_checks(folder: Path) -> None:
    """Add the tables of checksums to a snapshot of version 0.1.0.

    Raises: CacheError if its tables are damaged, or the checksums cannot be written.
    """
    manifest = read_manifest(folder)
    if has_checks(manifest):
        return
    damaged = damaged_tables(folder, manifest)
    if damaged:
        raise DamagedCacheError.of(damaged[0])
    add_tables(folder, lambda into: write_snapshot_checks(folder, into))


def warn_unchecked(folder: Path) -> None:
    """Warn once per process that the rows of a table cannot be verified."""
    if folder not in _warned:
        _warned.add(folder)
        LOG.warning(
            "%s: was built by an older version of megablend, without checksums of rows, so rows are not verified when they "
            "are read; run `megablend build CONFIG` to add the checksums",
            folder,
        )
