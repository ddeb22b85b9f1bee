"""Several snapshots of a run, read as one: their files, chunks and blocks are numbered
consecutively, in the order of the snapshots.

The tables are not copied: each row is read from the table of its snapshot, and verified there. In
the last snapshot that has a source, the source keeps its name. In earlier snapshots, the number of
the snapshot is appended to the name, so that names are unique. A file that was renamed is read from
its path in the last snapshot that has its content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.arrays import Bools, Int64s, running_totals
from megablend.caches.base import CacheStore
from megablend.formats.buffers import as_numpy
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.index.tables.file_table import FileTable
from megablend.index.tables.row_checks import PLACE, RUNNING, CheckedTable
from megablend.index.tables.source_entry import ColumnEntry, SourceEntry, Sources
from megablend.index.tables.tables import CHUNK_COLUMNS, FILE_SCHEMA
from megablend.lazy import cached_property
from megablend.storage.location import join


class GoneFile(NamedTuple):
    """A file of an earlier snapshot whose content is missing from the last snapshot."""

    source: str
    snapshot: int
    """Number of the last snapshot that contains the file."""
    numbers: list[int]
    """Numbers of all files with this content: first the file's number in that snapshot, then the
    numbers of files in earlier snapshots."""


class JoinedSnapshot(Snapshot):
    """Several snapshots of one cache, read as one index. Its digest and folder are those of the
    last one.

    Attributes:
        snapshots: the joined snapshots, in order; at least one.
        first_blocks: int64 [num_snapshots + 1], number of each snapshot's first block, and the
            total number of blocks.
    """

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        # Do not call Snapshot.__init__, which would open tables; use those of the joined snapshots
        self.snapshots = tuple(snapshots)
        last = self.snapshots[-1]
        self.folder = last.folder
        self.store = last.store
        self.digest = last.digest
        self.first_blocks = running_totals([snapshot.num_blocks for snapshot in snapshots])
        self._first_files = running_totals([snapshot.num_files for snapshot in snapshots])
        first_chunks = running_totals([snapshot._num_chunks for snapshot in snapshots])
        totals = np.stack(
            [
                snapshot._blocks.take("running", np.array([snapshot.num_blocks]))[:, 0]
                for snapshot in snapshots
            ]
        )
        before = np.concatenate([np.zeros((1, len(RUNNING)), np.int64), np.cumsum(totals, axis=0)])
        self._blocks = _JoinedTable(  # type: ignore[assignment]
            [snapshot._blocks for snapshot in snapshots],
            self.first_blocks,
            {"running": before[:-1], "place": _shifts(PLACE, "chunk", first_chunks)},
        )
        self._first_chunks = first_chunks
        self.num_blocks = int(self.first_blocks[-1])
        self._num_chunks = int(first_chunks[-1])
        self.num_files = int(self._first_files[-1])
        sources, self.columns, numbers = _join_columns(
            self.snapshots, self._first_files, self.first_blocks
        )
        self.sources = Sources(
            [entry.name for entry in sources],
            [entry.read for entry in sources],
            sources.__getitem__,
        )
        self.roots = {entry.name: entry.root for entry in sources}
        self.files = _JoinedFiles(
            [snapshot.files for snapshot in snapshots], numbers, self.first_blocks, first_chunks
        )

    def __reduce__(self) -> tuple[Callable[..., Snapshot], tuple[Any, ...]]:
        return open_snapshots, (self.store, tuple(snapshot.digest for snapshot in self.snapshots))

    @cached_property
    def _chunks(self) -> CheckedTable:
        shifts = {"row": _shifts(CHUNK_COLUMNS.names or (), "file", self._first_files)}
        return _JoinedTable(
            [snapshot._chunks for snapshot in self.snapshots], self._first_chunks, shifts
        )  # type: ignore[return-value]

    @cached_property
    def _counted(self) -> Bools:
        return np.concatenate([snapshot._counted for snapshot in self.snapshots])

    @cached_property
    def seen(self) -> npt.NDArray[np.uint64]:
        """The versions of the files (uint64 [num_files]); see Snapshot.seen. Raises: CacheError."""
        seen = np.concatenate([snapshot.seen for snapshot in self.snapshots])
        for old, new in self._renamed.items():
            seen[old] = seen[new]
        return seen

    def file_names(self) -> list[str]:
        """Return the names of all files; see Snapshot.file_names. Renamed files have their current
        names."""
        names = super().file_names()
        for old, new in self._renamed.items():
            names[old] = names[new]
        return names

    def path(self, i: int, roots: Mapping[str, str] | None = None) -> str:
        """Return the path of a file; see Snapshot.path. A renamed file has its current path."""
        return super().path(self._renamed.get(i, i), roots)

    def list_former_paths(self, roots: Mapping[str, str] | None = None) -> dict[int, str]:
        """Return the former path of each file that has been renamed or moved in a later snapshot,
        by the file's number."""
        return {i: super(JoinedSnapshot, self).path(i, roots) for i in self._renamed}

    @cached_property
    def _renamed(self) -> dict[int, int]:
        """Number of each file that has been renamed or moved in a later snapshot -> number of a
        file with the same content in the last snapshot that has this content."""
        # Source and column -> key of the content -> path in the last snapshot with this content ->
        # number of the file
        latest = dict[tuple[str, str], dict[str, dict[str, int]]]()
        renamed = dict[int, int]()
        for snapshot, first in reversed(
            list(zip(self.snapshots, self._first_files.tolist(), strict=False))
        ):
            names = snapshot.file_names()
            for column in snapshot.columns:
                latest_of_column = latest.setdefault((column.source_name, column.column), {})
                paths_of_key = dict[str, dict[str, int]]()
                for i, key in zip(column.files, snapshot.files.keys(column), strict=True):
                    paths_of_key.setdefault(key, {})[join(column.root, names[i])] = first + i
                for key, paths in paths_of_key.items():
                    current_paths = latest_of_column.setdefault(key, paths)
                    current = next(iter(current_paths.values()))
                    renamed |= {
                        i: current for path, i in paths.items() if path not in current_paths
                    }
        return renamed

    def find_last(self, i: int) -> tuple[int, int]:
        """Return the number of the last snapshot that has the content of file i, and the file's
        number in that snapshot."""
        current = self._renamed.get(i, i)
        snapshot = int(np.searchsorted(self._first_files, current, "right")) - 1
        return snapshot, current - int(self._first_files[snapshot])

    def files_of(self, snapshot: int, sources: Sequence[str]) -> list[int]:
        """Return the numbers of the files of the named sources in one of the snapshots, which is
        given by its number."""
        first = int(self._first_files[snapshot])
        entries = self.snapshots[snapshot].sources
        return [
            first + number for entry in entries if entry.name in sources for number in entry.files
        ]

    def list_gone(self, sources: Sequence[str]) -> list[GoneFile]:
        """List the files of the named sources whose content is not in the last snapshot. If several
        files have the same content in the last snapshot that has this content, each is listed."""
        last = len(self.snapshots) - 1
        gone = list[GoneFile]()
        # For each source and content: the listed files; empty if the last snapshot has the content
        gone_of_content = dict[tuple[str, str], list[GoneFile]]()
        for number, snapshot in reversed(list(enumerate(self.snapshots))):
            first = int(self._first_files[number])
            for entry in (listed for listed in snapshot.sources if listed.name in sources):
                # Files of one snapshot may have the same content, so they are added after the
                # snapshot's last file
                added = dict[tuple[str, str], list[GoneFile]]()
                for i, content in zip(entry.files, snapshot.files.keys(entry), strict=True):
                    key = entry.name, content
                    if key in gone_of_content:
                        for file in gone_of_content[key]:
                            file.numbers.append(first + i)
                    elif number < last:
                        gone.append(GoneFile(entry.name, number, [first + i]))
                        added.setdefault(key, []).append(gone[-1])
                    else:
                        added[key] = []
                gone_of_content |= added
        return gone

    def list_repeated(self) -> list[int]:
        """List the numbers of the files whose content is also in a later snapshot."""
        names = list({entry.name for snapshot in self.snapshots for entry in snapshot.sources})
        last = len(self.snapshots) - 1
        counted = set(self.files_of(last, names)).union(
            gone.numbers[0] for gone in self.list_gone(names)
        )
        earlier = (i for number in range(last) for i in self.files_of(number, names))
        return [i for i in earlier if i not in counted]

    @property
    def token_ranges(self) -> Int64s:
        """The smallest and the largest token of each file (int64 [num_files, 2]); see
        Snapshot.token_ranges. Raises: CacheError."""
        return np.concatenate([snapshot.token_ranges for snapshot in self.snapshots])


def open_snapshots(cache: CacheStore, digests: Sequence[str]) -> Snapshot:
    """Open one snapshot, or several as one, given their digests. Raises: see `open_snapshot`."""
    snapshots = [open_snapshot(cache, digest) for digest in digests]
    return snapshots[0] if len(snapshots) == 1 else JoinedSnapshot(snapshots)


class _JoinedTable:
    """Tables with the same columns, read as one long table. It has the methods of CheckedTable."""

    def __init__(
        self, tables: Sequence[CheckedTable], first_rows: Int64s, shifts: dict[str, Int64s]
    ) -> None:
        """Join tables.

        Args:
            first_rows: int64 [num_tables + 1], number of each table's first row.
            shifts: for each group of columns, the numbers to add to the columns of each table,
                int64 [num_tables, num_columns].
        """
        self._tables = tuple(tables)
        self._first_rows = first_rows
        self._shifts = shifts

    def take(self, group: str, rows: Int64s) -> Int64s:
        """Read the columns of a group; see CheckedTable.take."""
        tables = self._find_tables(rows)
        joined = np.empty((self._shifts[group].shape[1], len(rows)), np.int64)
        for number in np.unique(tables).tolist():
            inside = tables == number
            values = self._tables[number].take(group, rows[inside] - self._first_rows[number])
            joined[:, inside] = values + self._shifts[group][number][:, np.newaxis]
        return joined

    def find_last(self, group: str, name: str, span: range, values: Int64s) -> Int64s:
        """Find, for each value, the last row at which a column is at most that value; see
        CheckedTable.find_last. All rows of `span` must belong to one table."""
        number = int(self._find_tables(np.array([span.start]))[0])
        first = int(self._first_rows[number])
        shift = self._shifts[group][number, RUNNING.index(name)]
        local = range(span.start - first, span.stop - first)
        return first + self._tables[number].find_last(group, name, local, values - shift)

    def _find_tables(self, rows: Int64s) -> Int64s:
        """Return the number of the table that contains each row (int64 [n]). The row of totals
        after all other rows belongs to the last table."""
        tables: Int64s = np.searchsorted(self._first_rows, rows, side="right") - 1
        return np.minimum(tables, len(self._tables) - 1)


class _JoinedFiles(FileTable):
    """The files of several snapshots."""

    def __init__(
        self,
        tables: Sequence[FileTable],
        columns: Sequence[Int64s],
        first_blocks: Int64s,
        first_chunks: Int64s,
    ) -> None:
        """Join the file tables of snapshots.

        Args:
            columns: for each snapshot, the numbers of its columns in the JoinedSnapshot.
        """
        self._path = tables[-1]._path
        batches = [
            _replace_columns(
                table._files,
                {
                    "source": numbers[table.columns],
                    "first_block": as_numpy(table._files.column("first_block")) + first_block,
                    "first_chunk": as_numpy(table._files.column("first_chunk")) + first_chunk,
                },
            )
            for table, numbers, first_block, first_chunk in zip(
                tables, columns, first_blocks[:-1], first_chunks[:-1], strict=True
            )
        ]
        self._files = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
        self.columns = as_numpy(self._files.column("source"))
        self.first_block = self._offsets("first_block", int(first_blocks[-1]))
        self.first_chunk = self._offsets("first_chunk", int(first_chunks[-1]))


def _replace_columns(batch: pa.RecordBatch, values: dict[str, npt.NDArray[Any]]) -> pa.RecordBatch:
    arrays = [
        pa.array(values[field.name], field.type)
        if field.name in values
        else batch.column(field.name)
        for field in FILE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=FILE_SCHEMA)


def _join_columns(
    snapshots: Sequence[Snapshot], first_files: Int64s, first_blocks: Int64s
) -> tuple[tuple[SourceEntry, ...], tuple[ColumnEntry, ...], list[Int64s]]:
    """Join the columns of all snapshots.

    Returns: the sources; all columns, sources first; and for each snapshot, the numbers of its
        columns in that list.
    """
    sources = list[SourceEntry]()
    extra = list[ColumnEntry]()
    # For each snapshot and each of its columns: whether it is a source, and its position in
    # `sources` or `extra`
    positions = list[list[tuple[bool, int]]]()
    for number, snapshot in enumerate(snapshots):
        later = {entry.name for other in snapshots[number + 1 :] for entry in other.sources}
        first_file = int(first_files[number])
        first_block = int(first_blocks[number])
        positions.append([])
        for column in snapshot.columns:
            name = name_source(column.source_name, number, later)
            moved = _move(column, first_file, first_block, name)
            is_source = isinstance(moved, SourceEntry)
            listed: list[Any] = sources if is_source else extra
            positions[-1].append((is_source, len(listed)))
            listed.append(moved)
    numbers = [
        np.array([i if is_source else len(sources) + i for is_source, i in positions_of_snapshot])
        for positions_of_snapshot in positions
    ]
    return tuple(sources), (*sources, *extra), numbers


def name_source(name: str, number: int, later: set[str]) -> str:
    """Return the name that a source of snapshot `number` has in the joined snapshot. `later`
    contains the names of the sources of all later snapshots."""
    # Names in a config have no spaces, so the result is unique
    return f"{name} (snapshot {number})" if name in later else name


def _move(column: ColumnEntry, first_file: int, first_block: int, name: str) -> ColumnEntry:
    """Convert a column of a snapshot to a column of the joined snapshot, in which the numbers of
    the snapshot's files and blocks begin at `first_file` and `first_block`."""
    moved = dataclasses.replace(
        column,
        source_name=name,
        files=range(column.files.start + first_file, column.files.stop + first_file),
        blocks=range(column.blocks.start + first_block, column.blocks.stop + first_block),
    )
    if not isinstance(moved, SourceEntry):
        return moved
    extra = tuple(
        _move(extra_column, first_file, first_block, name) for extra_column in moved.extra_columns
    )
    return dataclasses.replace(moved, extra_columns=extra)


def _shifts(names: Sequence[str], shifted: str, firsts: Int64s) -> Int64s:
    """Return the numbers to add to the columns `names` of each table (int64 [num_tables,
    len(names)]). Column `shifted` contains row numbers of another table, so `firsts` is added to
    it. The numbers for the other columns are 0."""
    shifts = np.zeros((len(firsts) - 1, len(names)), np.int64)
    shifts[:, list(names).index(shifted)] = firsts[:-1]
    return shifts
