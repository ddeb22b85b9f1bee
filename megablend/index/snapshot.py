"""A snapshot of the index (a generation, in the cache's own words): the sources, files and blocks that one build found.

A snapshot is whole once it has its name, since it gets it last; opening checks the manifest, the table of files and the tables'
sizes, and takes the same time for any number of blocks; rows of the larger tables are verified as they are taken
(`checked_table`). All that is in a snapshot, but for its roots, is the same for the same data, options and version, wherever and
by however many processes it was made. `cache_folders` says where in a cache it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.errors import REPAIR_REMEDY, CacheError
from megablend.formats import find_format
from megablend.formats.base import CHUNK_DTYPE, PLACED_BLOCK_DTYPE
from megablend.fs.atomic_write import checksum, reading
from megablend.index.cache_folders import generations
from megablend.index.checked_table import (
    BLOCK_LAYOUT,
    CHUNK_LAYOUT,
    PLACE,
    RUNNING,
    CheckedTable,
    has_checks,
    warn_unchecked,
)
from megablend.index.file_table import FileEntry, FileTable
from megablend.index.file_versions import read_seen, tell_unknown
from megablend.index.list_snapshots import is_committed, list_snapshots
from megablend.index.manifest import BLOCKS, CHUNKS, FILES, MANIFEST, ROOTS, read_generation_manifest, read_roots
from megablend.index.source_entry import ColumnEntry, SourceEntry, make_columns
from megablend.index.tables import CHUNK_COLUMNS
from megablend.index.token_ranges import read_ranges
from megablend.lazy import cached_property
from megablend.storage.location import join

Int64Array = npt.NDArray[np.int64]


class Snapshot:
    """An opened index. Picklable: it is opened again where it arrives.

    Attributes:
        digest: its name.
        sources: in the order of the build.
        columns: all columns of the sources; column i of the first num_sources holds the tokens of source i, extra ones follow.
        num_files, num_blocks: of all columns.
        tokens_before, rows_before, ends_before: int64 [num_blocks + 1], running counts over the blocks, memory-mapped and not
            verified; `running`, `count_tokens_before` and `find_blocks` verify what they give.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        self.folder = folder
        self.digest = folder.name
        self._has_checks = has_checks(manifest)
        if not self._has_checks:
            warn_unchecked(folder)
        self._blocks = CheckedTable(folder, BLOCK_LAYOUT, checks=self._has_checks)
        columns = self._blocks.mapped
        self.tokens_before, self.rows_before, self.ends_before = (columns[name] for name in RUNNING)
        self.num_blocks = self._blocks.num_rows - 1
        if self.num_blocks != manifest["num_blocks"]:
            raise CacheError(
                f"{folder / BLOCKS}: damaged table: {self.num_blocks} blocks, {manifest['num_blocks']} were committed; "
                f"{REPAIR_REMEDY}"
            )
        self._num_chunks: int = manifest["num_chunks"]
        self._files = FileTable(
            folder,
            num_files=manifest["num_files"],
            num_columns=len(manifest["sources"]),
            num_blocks=self.num_blocks,
            num_chunks=self._num_chunks,
        )
        self.num_files = len(self._files)
        self._first_block, self._first_chunk = self._files.first_block, self._files.first_chunk
        self.sources, self.columns = self._read_columns(manifest["sources"], found)

    def __reduce__(self) -> tuple[Callable[..., Snapshot], tuple[str, str]]:
        return open_snapshot, (str(self.cache), self.digest)

    @property
    def cache(self) -> Path:
        """The cache that holds it."""
        return self.folder.parent.parent

    def chunks(self, file: FileEntry) -> npt.NDArray[np.void]:
        """CHUNK_DTYPE [file.num_chunks]: the column chunks of a file; `file` in them is its number."""
        rows = np.arange(file.first_chunk, file.first_chunk + file.num_chunks)
        chunks = np.empty(len(rows), CHUNK_DTYPE)
        for name, values in zip(CHUNK_COLUMNS.names or (), self._chunks.take("row", rows), strict=True):
            chunks[name] = values
        chunks.flags.writeable = False
        return chunks

    def chunks_of(self, ids: npt.ArrayLike, column: str) -> tuple[Int64Array, npt.NDArray[Any]]:
        """Column chunks that blocks `ids` int64 [n] lie in: their numbers in the index, int64 [n], and what `column` says."""
        numbers = self._blocks.take("place", np.asarray(ids, np.int64))[PLACE.index("chunk")]
        distinct, places = np.unique(numbers, return_inverse=True)
        self._check_chunks(distinct, 0, self._num_chunks)
        return numbers, self._chunks.take("row", distinct)[(CHUNK_COLUMNS.names or ()).index(column)][places]

    def _check_chunks(self, chunks: Int64Array, low: int | Int64Array, high: int | Int64Array) -> None:
        """Refuse numbers of chunks outside [low, high)."""
        if ((chunks < low) | (chunks >= high)).any():
            raise CacheError(
                f"{self.folder / BLOCKS}: damaged table: a block's chunk is none of its file's; {REPAIR_REMEDY}"
            )

    @cached_property
    def _chunks(self) -> CheckedTable:
        table = CheckedTable(self.folder, CHUNK_LAYOUT, checks=self._has_checks)
        if table.num_rows != self._num_chunks:
            raise CacheError(
                f"{self.folder / CHUNKS}: damaged table: {table.num_rows} rows, {self._num_chunks} were committed; "
                f"{REPAIR_REMEDY}"
            )
        return table

    def file(self, i: int) -> FileEntry:
        """File number i. Raises: IndexError."""
        return self._files.entry(i)

    @cached_property
    def seen(self) -> npt.NDArray[np.uint64]:
        """uint64 [num_files]: the version of each file that the last build saw, see `file_versions`; 0 where unknown.

        Raises: CacheError.
        """
        found = read_seen(self.folder, self.num_files)
        if found is None:
            tell_unknown(self.folder)
            return np.zeros(self.num_files, np.uint64)
        return found

    @property
    def token_ranges(self) -> Int64Array:
        """int64 [num_files, 2]: smallest and largest token of each file; smallest > largest where unknown. Raises: CacheError."""
        return read_ranges(self.folder, self.num_files)

    def file_names(self) -> list[str]:
        """Names of all files, relative to their sources' roots."""
        return self._files.names()

    def file_keys(self, column: ColumnEntry) -> list[str]:
        """See FileTable.keys."""
        return self._files.keys(column)

    def file_contents(self) -> list[tuple[str, str]]:
        """See FileTable.contents."""
        return self._files.contents()

    def token_dtypes(self, column: ColumnEntry) -> Sequence[str]:
        """See FileTable.token_dtypes."""
        return self._files.token_dtypes(column)

    @property
    def file_columns(self) -> npt.NDArray[np.int32]:
        """int32 [num_files]: index of each file's column."""
        return self._files.columns

    @property
    def file_token_bytes(self) -> Int64Array:
        """int64 [num_files]: bytes of a token of each file, decoded."""
        return self._files.token_bytes

    def column_of(self, i: int) -> ColumnEntry:
        """The column that file i belongs to. Raises: IndexError."""
        return self.columns[self.file(i).column]

    def path(self, i: int, roots: Mapping[str, str] | None = None) -> str:
        """Path of file i; `roots` (source name -> folder) overrides what the last build recorded."""
        entry = self.file(i)
        column = self.columns[entry.column]
        return join((roots or {}).get(column.source_name, column.root), entry.name)

    def file_of(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """File numbers of blocks. int32 [n]."""
        # Files without blocks begin where the next one does: the last of those that begin at a block has it.
        return (np.searchsorted(self._first_block, np.asarray(ids), side="right") - 1).astype(np.int32)

    def blocks(self, ids: npt.ArrayLike) -> npt.NDArray[np.void]:
        """Rows of the block table as the files' formats know them.

        Args:
            ids: int64 [n], block numbers of the generation.

        Returns: PLACED_BLOCK_DTYPE [n]; `chunk` counts the file's own chunks; rows, first_row and ends are -1 where not counted.
        Raises: CacheError where the table is damaged, and that is seen.
        """
        ids = np.asarray(ids, np.int64)
        files = self.file_of(ids)
        rows = np.empty(len(ids), PLACED_BLOCK_DTYPE)
        for name, values in zip(PLACE, self._blocks.take("place", ids), strict=True):
            rows[name] = values
        chunks, first_chunk = rows["chunk"], self._first_chunk[files]
        self._check_chunks(chunks, first_chunk, self._first_chunk[files + 1])
        rows["chunk"] = chunks - first_chunk
        running = self._blocks.take("running", np.concatenate((ids, ids + 1)))
        before, counts = running[:, : len(ids)], running[:, len(ids) :] - running[:, : len(ids)]
        rows["tokens"], counted = counts[0], self._counted[files]
        rows["first_token"] = before[0] - self._first_token[files]
        rows["first_row"] = np.where(counted, before[1] - self._first_row[files], -1)
        for name, values in zip(("rows", "ends"), counts[1:], strict=True):
            rows[name] = np.where(counted, values, -1)
        return rows

    def running(self, name: str, ids: npt.ArrayLike) -> Int64Array:
        """One of tokens_before, rows_before and ends_before at `ids` int64 [n], verified: int64 [n]. Raises: CacheError."""
        counts: Int64Array = self._blocks.take("running", np.asarray(ids, np.int64))[RUNNING.index(name)]
        return counts

    def count_tokens_before(self, ids: npt.ArrayLike, *, eod: bool) -> Int64Array:
        """Tokens before blocks `ids` int64 [n], with an end-of-document token a document or without: int64 [n].

        Raises: CacheError.
        """
        counts = self._blocks.take("running", np.asarray(ids, np.int64))
        tokens: Int64Array = counts[0] + counts[2] if eod else counts[0]
        return tokens

    def find_blocks(self, name: str, span: range, values: Int64Array) -> Int64Array:
        """The last blocks of `span` before which a running count is at most `values` int64 [n]: int64 [n].

        Args:
            values: at least the count before the span's first block, and less than the count after its last one.

        Raises: CacheError.
        """
        return self._blocks.find_last("running", name, span, values)

    @cached_property
    def _first_token(self) -> Int64Array:
        """int64 [num_files + 1]: tokens before each file."""
        return self.running("tokens_before", self._first_block)

    @cached_property
    def _first_row(self) -> Int64Array:
        """int64 [num_files + 1]: counted documents before each file."""
        return self.running("rows_before", self._first_block)

    @cached_property
    def _counted(self) -> npt.NDArray[np.bool_]:
        """bool [num_files]: the file's documents were counted."""
        counted = np.zeros(self.num_files, bool)
        for column in self.columns:
            counted[column.files.start : column.files.stop] = column.documents
        return counted

    def _read_columns(
        self, records: Sequence[Mapping[str, Any]], found: Mapping[str, Any]
    ) -> tuple[tuple[SourceEntry, ...], tuple[ColumnEntry, ...]]:
        firsts = np.array([record["first_file"] for record in records], np.int64)
        stops = firsts + np.array([record["num_files"] for record in records], np.int64)
        borders = np.stack([self._first_block[firsts], self._first_block[stops]], axis=1)
        counts = self._blocks.take("running", borders.reshape(-1), plainly=True).reshape(len(RUNNING), -1, 2)
        return make_columns(self.folder, records, found, borders, counts[..., 1] - counts[..., 0])


def open_snapshot(cache: str | Path, digest: str) -> Snapshot:
    """Open a generation by its digest.

    Raises: CacheError where there is none of that name, it is not whole, or a newer version wrote it.
    """
    folder = generations(cache) / digest
    if not is_committed(folder):
        known = ", ".join(list_snapshots(cache)) or "none"
        raise CacheError(
            f"{folder}: there is no such generation of the index (those there are: {known}); "
            "`megablend build CONFIG` makes it again if the data is as it was; otherwise give the run another name (`run:`), or "
            "reset it (`megablend runs reset CONFIG`), and build"
        )
    manifest = read_generation_manifest(folder)
    for name, entry in manifest["tables"].items():
        path = folder / name
        with reading(path):
            size = path.stat().st_size if path.is_file() else 0
        if size != entry["bytes"]:
            raise CacheError(f"{path}: has {size} bytes, {entry['bytes']} were committed; {REPAIR_REMEDY}")
    # The table of files is read whole anyway, and what it says is believed; the larger ones would take too long here.
    if checksum(folder / FILES) != manifest["tables"][FILES]["blake2b"]:
        raise CacheError(f"{folder / FILES}: damaged table: its checksum is wrong; {REPAIR_REMEDY}")
    found = read_roots(folder)
    for entry in manifest["sources"]:
        if not isinstance(found["roots"].get(entry["name"]), str):
            raise CacheError(f"{folder / ROOTS}: does not say where source {entry['name']!r} lies; {REPAIR_REMEDY}")
        if find_format(entry["format"]) is None:
            raise CacheError(
                f"{folder / MANIFEST}: source {entry['name']!r} is of a format, {entry['format']!r}, that this "
                "megablend does not know; install the version or the package that wrote it, or build again"
            )
    with reading(folder):
        return Snapshot(folder, manifest, found)
