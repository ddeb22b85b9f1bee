"""Tables of a snapshot whose rows are verified when they are read.

    blocks.check.arrow   uint32 `place` and `running`, one row for each row of blocks.arrow
    chunks.check.arrow   uint32 `row`, one row for each row of chunks.arrow

A checksum is computed from a row's number and values (`kernels.row_checks`). Running counts are mostly read without the rest of
a row, so they have their own checksum. The tables of checksums are listed in the manifest but derived from the other tables: they
are not part of the digest, and a cache of version 0.1.0 has none until it is rebuilt.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import DamagedCacheError
from megablend.fs.atomic_write import checksum, flush_folder, replace_file, temp_sibling, translate_os_errors
from megablend.index.manifest import BLOCKS, CHUNKS, MANIFEST, damaged_tables, dump_with_checksum, read_manifest
from megablend.index.mapped_table import MappedTable
from megablend.index.tables import BLOCK_COLUMNS, CHUNK_COLUMNS, TableWriter
from megablend.kernels.row_checks import row_checks
from megablend.system.log import LOG

PLACE = ("chunk", "offset", "stored_bytes", "decoded_bytes", "encoding", "flags")
RUNNING = ("tokens_before", "rows_before", "ends_before")
_PASS = 1 << 18
"""Rows per pass of computing checksums."""
_GOLDEN, _FIRST, _SECOND = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A table, and the columns that each checksum covers."""

    table: str
    columns: np.dtype[np.void]
    checks: str
    """File name of the table of checksums."""
    groups: Mapping[str, tuple[str, ...]]
    """Columns by the name of their checksum."""

    @property
    def check_columns(self) -> np.dtype[np.void]:
        """Columns of the table of checksums."""
        return np.dtype([(name, "<u4") for name in self.groups])


BLOCK_LAYOUT = Layout(
    table=BLOCKS, columns=BLOCK_COLUMNS, checks="blocks.check.arrow", groups={"place": PLACE, "running": RUNNING}
)
CHUNK_LAYOUT = Layout(
    table=CHUNKS, columns=CHUNK_COLUMNS, checks="chunks.check.arrow", groups={"row": CHUNK_COLUMNS.names or ()}
)
LAYOUTS = (BLOCK_LAYOUT, CHUNK_LAYOUT)


class CheckedTable:
    """A memory-mapped table of a snapshot, and its checksums. Safe to share between threads, and after a fork."""

    def __init__(self, folder: Path, layout: Layout, *, checks: bool) -> None:
        """Args: checks: there is a table of checksums; otherwise rows are not verified."""
        self._path, self._layout = f"{folder}/{layout.table}", layout
        self.mapped = MappedTable(self._path, layout.columns)
        self._checks = MappedTable(f"{folder}/{layout.checks}", layout.check_columns) if checks else None
        self.num_rows = len(self.mapped[(layout.columns.names or ("",))[0]])
        if self._checks is not None and len(self._checks[next(iter(layout.groups))]) != self.num_rows:
            raise DamagedCacheError.of(
                f"{folder / layout.checks}: damaged table: its number of rows differs from {layout.table}"
            )

    def take(self, group: str, rows: Int64s, *, plainly: bool = False) -> Int64s:
        """Verified columns of one checksum for `rows` int64 [n], numbers in range, in any order: int64 [num_columns, n].

        Args:
            plainly: verify without a kernel, which would have to be loaded first; for a few rows on opening.

        Raises: CacheError if a row is not what was committed, or cannot be read.
        """
        names = self._layout.groups[group]
        values = np.empty((len(names), len(rows)), np.int64)
        for place, name in enumerate(names):
            values[place] = self.mapped.take(name, rows)
        if self._checks is not None and len(rows):
            found = (plain_row_checks if plainly else compute_checks)(rows, values)
            wrong = found != self._checks.take(group, rows)
            if wrong.any():
                raise DamagedCacheError.of(
                    f"{self._path}: damaged table: row {rows[wrong.argmax()]} does not match its checksum in "
                    f"{self._layout.checks}"
                )
        return values

    def find_last(self, group: str, name: str, span: range, values: Int64s) -> Int64s:
        """The last rows of `span` at which an ascending column is at most `values` int64 [n]: int64 [n].

        Args:
            values: at least the column's value at span.start, and less than at span.stop.

        Raises: CacheError if one of these rows, or the row after it, is not what was committed, or the column is not ascending.
        """
        column = self.mapped[name][span.start : span.stop]
        found = span.start + np.searchsorted(column, values, side="right").astype(np.int64) - 1
        found = np.clip(found, span.start, span.stop - 1)
        low, high = self.take(group, np.concatenate((found, found + 1)))[
            self._layout.groups[group].index(name)
        ].reshape(2, -1)
        if ((low > values) | (high <= values)).any():
            raise DamagedCacheError.of(f"{self._path}: damaged table: its {name} is not ascending")
        return found


def plain_row_checks(rows: Int64s, values: Int64s) -> npt.NDArray[np.uint32]:
    """The result of the kernel `row_checks`, computed with NumPy: uint32 [n]."""
    found = _mixed(rows.view(np.uint64) + _GOLDEN)
    for column in values.view(np.uint64):
        found = _mixed(found ^ column)
    checks: npt.NDArray[np.uint32] = (found >> np.uint64(32)).astype(np.uint32)
    return checks


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    x ^= x >> np.uint64(31)
    return x


def compute_checks(rows: Int64s, values: Int64s) -> npt.NDArray[np.uint32]:
    """Compute the checksums of `rows` int64 [n], numbers, and `values` int64 [num_columns, n]: uint32 [n]."""
    found = np.empty(len(rows), np.uint32)
    row_checks(np.ascontiguousarray(rows).view(np.uint64), values.view(np.uint64), found)
    return found


def has_checks(manifest: Mapping[str, Any]) -> bool:
    """Whether a snapshot has the tables of checksums."""
    return all(layout.checks in manifest["tables"] for layout in LAYOUTS)


def write_checks(folder: Path, into: Path) -> dict[str, dict[str, Any]]:
    """Write checksums of the tables in `folder` to tables in `into`; returns their entries for the manifest."""
    entries = {}
    for layout in LAYOUTS:
        table = CheckedTable(folder, layout, checks=False)
        with TableWriter(into / layout.checks, layout.check_columns) as checks:
            for start in range(0, table.num_rows, _PASS):
                rows = np.arange(start, min(start + _PASS, table.num_rows))
                checks.append({name: compute_checks(rows, table.take(name, rows)) for name in layout.groups})
            checks.finish()
        path = into / layout.checks
        entries[layout.checks] = {"bytes": path.stat().st_size, "blake2b": checksum(path)}
    return entries


def complete_checks(folder: Path) -> bool:
    """Add tables of checksums to a snapshot of version 0.1.0; its manifest is replaced last, atomically.

    Returns: whether they were missing.
    Raises: CacheError if its tables are damaged, or the cache cannot be written.
    """
    manifest = read_manifest(folder)
    if has_checks(manifest):
        return False
    if damaged := damaged_tables(folder, manifest):
        raise DamagedCacheError.of(damaged[0])
    with translate_os_errors(folder):
        aside = temp_sibling(folder / "checks")
        aside.mkdir()
        try:
            entries = write_checks(folder, aside)
            for name in entries:
                (aside / name).replace(folder / name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        flush_folder(folder)
    replace_file(folder / MANIFEST, dump_with_checksum({**manifest, "tables": {**manifest["tables"], **entries}}))
    return True


def warn_unchecked(folder: Path) -> None:
    """Warn once per process that the rows of a table cannot be verified."""
    if folder not in _warned:
        _warned.add(folder)
        LOG.warning(
            "%s: built by an older version of megablend, without checksums of rows: rows are not verified when they are "
            "read; `megablend build CONFIG` adds the checksums",
            folder,
        )


_warned: set[Path] = set()
