"""A snapshot of the index: the sources, files and blocks that one build found. On disk, a snapshot
is called a generation.

A snapshot gets its final name last, so a snapshot with such a name is complete. Opening checks the
manifest, the table of files and the sizes of the tables, in constant time for any number of blocks;
rows of the larger tables are verified when they are read (`row_checks`). Apart from its roots, the
content of a snapshot depends only on the data, the options and the version, not on the location or
the number of processes of the build. `cache_folders` describes the layout of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s, running_totals
from megablend.caches.base import CHECKSUMS, SNAPSHOTS, CacheStore
from megablend.caches.find import CacheLike, find_store
from megablend.errors import REBUILD_REMEDY, CacheError, DamagedCacheError
from megablend.formats import find_format, get_format
from megablend.formats.base import CHUNK_DTYPE, PLACED_BLOCK_DTYPE
from megablend.index.tables.file_table import FileEntry, FileTable, read_ranges
from megablend.index.tables.file_versions import read_seen, warn_unknown
from megablend.index.tables.list_snapshots import list_snapshots
from megablend.index.tables.manifest import (
    BLOCKS,
    CHUNKS,
    FILES,
    MANIFEST,
    ROOTS,
    check_sizes,
    damaged_tables,
    read_roots,
    read_snapshot_manifest,
)
from megablend.index.tables.row_checks import (
    PLACE,
    RUNNING,
    CheckedTable,
    has_checks,
    warn_unchecked,
)
from megablend.index.tables.source_entry import ColumnEntry, make_columns
from megablend.index.tables.tables import CHUNK_COLUMNS
from megablend.lazy import cached_property
from megablend.storage.base import Storage
from megablend.storage.location import join
from megablend.system.atomic_write import checksum, reading
from megablend.system.log import LOG


class Snapshot:
    """An opened snapshot of the index. It can be pickled: the receiving process opens it again.

    Attributes:
        digest: identifies the snapshot; also the name of its folder, `folder`.
        store: the store of the cache that contains the snapshot.
        sources: the sources, in the order of the build.
        roots: source name -> folder of the source's files at the last build.
        columns: all columns of the sources. The first num_sources columns contain the tokens of the
            sources, in the same order; the extra columns follow.
        files: the table of files, by number.
        num_files, num_blocks: numbers of files and blocks of all columns.
        tokens_before, rows_before, ends_before: int64 [num_blocks + 1], running counts over the
            blocks, memory-mapped and not verified; `running`, `count_tokens_before` and
            `find_blocks` verify what they return.

    Raises: CacheError if a table of the snapshot is damaged.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        last_build: Mapping[str, Any],
        store: CacheStore,
    ) -> None:
        self.folder = folder
        self.store = store
        self.digest = folder.name
        self._has_checks = has_checks(manifest)
        if not self._has_checks:
            warn_unchecked(folder)
        self._blocks = CheckedTable(folder, BLOCKS, checks=self._has_checks)
        columns = self._blocks.mapped
        self.tokens_before, self.rows_before, self.ends_before = map(columns.__getitem__, RUNNING)
        self.num_blocks = self._blocks.num_rows - 1
        if self.num_blocks != manifest["num_blocks"]:
            raise DamagedCacheError.of(
                f"{folder / BLOCKS}: damaged table: it has {self.num_blocks} blocks, but {manifest['num_blocks']} "
                "were committed"
            )
        self._num_chunks: int = manifest["num_chunks"]
        self.num_files: int = manifest["num_files"]
        self.files = FileTable(
            folder,
            num_files=self.num_files,
            num_columns=len(manifest["sources"]),
            num_blocks=self.num_blocks,
            num_chunks=self._num_chunks,
        )
        self.roots: Mapping[str, str] = last_build["roots"]
        self._records: Sequence[Mapping[str, Any]] = manifest["sources"]
        measure = partial(_measure, self._records, self.files.first_block, self._blocks)
        self.sources, self.columns = make_columns(folder, self._records, last_build, measure)

    def __reduce__(self) -> tuple[Callable[..., Snapshot], tuple[CacheStore, str]]:
        return _open_again, (self.store, self.digest)

    @cached_property
    def seen(self) -> npt.NDArray[np.uint64]:
        """The version of each file at the last build, or 0 if it is unknown (uint64 [num_files]);
        see `file_versions`.

        Raises: CacheError.
        """
        versions = read_seen(self.folder, self.num_files)
        if versions is None:
            warn_unknown(self.folder)
            return np.zeros(self.num_files, np.uint64)
        return versions

    @property
    def token_ranges(self) -> Int64s:
        """The smallest and the largest token of each file (int64 [num_files, 2]). If they are
        unknown, the first number is larger than the second. Raises: CacheError."""
        return read_ranges(self.folder, self.num_files)

    def file_names(self) -> list[str]:
        """Return the names of all files, relative to their sources' roots."""
        return self.files.names()

    def column_of(self, i: int) -> ColumnEntry:
        """Return the column that file i belongs to. Raises: IndexError if there is no such file."""
        return self.columns[self.files.entry(i).column]

    def path(self, i: int, roots: Mapping[str, str] | None = None) -> str:
        """Return the path of file i. `roots` (source name -> folder) overrides the folders that the
        last build recorded."""
        name = self.files.name(i)
        column = self.columns[self.files.columns[i]]
        return join((roots or {}).get(column.source_name, column.root), name)

    def chunks(self, file: FileEntry) -> npt.NDArray[np.void]:
        """Read the column chunks of a file: CHUNK_DTYPE [file.num_chunks]. Their field `file` is
        the file's number."""
        rows = np.arange(file.first_chunk, file.first_chunk + file.num_chunks)
        chunks = np.empty(len(rows), CHUNK_DTYPE)
        for name, values in zip(
            CHUNK_COLUMNS.names or (), self._chunks.take("row", rows), strict=True
        ):
            chunks[name] = values
        chunks.flags.writeable = False
        return chunks

    def chunks_of(self, ids: npt.ArrayLike, column: str) -> tuple[Int64s, npt.NDArray[Any]]:
        """Return the column chunk that contains each block.

        Args:
            ids: int64 [n], block numbers.
            column: name of a column of the chunk table.

        Returns: the number of each chunk in the index, int64 [n]; and its value of `column`, [n].
        """
        numbers = self._blocks.take("place", np.asarray(ids, np.int64))[PLACE.index("chunk")]
        distinct, positions = np.unique(numbers, return_inverse=True)
        self._check_chunks(distinct, 0, self._num_chunks)
        column_number = (CHUNK_COLUMNS.names or ()).index(column)
        values = self._chunks.take("row", distinct)[column_number]
        return numbers, values[positions]

    def _check_chunks(self, chunks: Int64s, low: int | Int64s, high: int | Int64s) -> None:
        """Check that all chunk numbers are in [low, high). Raises: CacheError."""
        if ((chunks < low) | (chunks >= high)).any():
            raise DamagedCacheError.of(
                f"{self.folder / BLOCKS}: damaged table: a block refers to a chunk outside its file"
            )

    @cached_property
    def _chunks(self) -> CheckedTable:
        table = CheckedTable(self.folder, CHUNKS, checks=self._has_checks)
        if table.num_rows != self._num_chunks:
            raise DamagedCacheError.of(
                f"{self.folder / CHUNKS}: damaged table: it has {table.num_rows} rows, but {self._num_chunks} were "
                "committed"
            )
        return table

    def file_of(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Return the number of the file that contains each block (int32 [n])."""
        # A file without blocks has the same first block as the next file. Of the files with the
        # same first block, the last one contains the block
        return (np.searchsorted(self.files.first_block, np.asarray(ids), side="right") - 1).astype(
            np.int32
        )

    def blocks(self, ids: npt.ArrayLike) -> npt.NDArray[np.void]:
        """Read rows of the block table, in the form that formats use.

        Args:
            ids: int64 [n], block numbers of the snapshot.

        Returns: PLACED_BLOCK_DTYPE [n]. The field `chunk` is the chunk's number within its file;
            `rows`, `first_row` and `ends` are -1 if documents were not counted.
        Raises: CacheError if the table is found to be damaged.
        """
        ids = np.asarray(ids, np.int64)
        files = self.file_of(ids)
        rows = np.empty(len(ids), PLACED_BLOCK_DTYPE)
        for name, values in zip(PLACE, self._blocks.take("place", ids), strict=True):
            rows[name] = values
        chunks = rows["chunk"]
        first_chunk = self.files.first_chunk[files]
        self._check_chunks(chunks, first_chunk, self.files.first_chunk[files + 1])
        rows["chunk"] = chunks - first_chunk
        running = self._blocks.take("running", np.concatenate((ids, ids + 1)))
        before = running[:, : len(ids)]
        counts = running[:, len(ids) :] - running[:, : len(ids)]
        rows["tokens"] = counts[0]
        counted = self._counted[files]
        first_token, first_row = self._before_files[:, files]
        rows["first_token"] = before[0] - first_token
        rows["first_row"] = np.where(counted, before[1] - first_row, -1)
        for name, values in zip(("rows", "ends"), counts[1:], strict=True):
            rows[name] = np.where(counted, values, -1)
        return rows

    def running(self, name: str, ids: npt.ArrayLike) -> Int64s:
        """Return the values of a running count at blocks, and verify them (`ids` and result: int64
        [n]). `name` is tokens_before, rows_before or ends_before. Raises: CacheError."""
        all_counts = self._blocks.take("running", np.asarray(ids, np.int64))
        counts: Int64s = all_counts[RUNNING.index(name)]
        return counts

    def count_tokens_before(self, ids: npt.ArrayLike, *, has_eod: bool) -> Int64s:
        """Return the number of tokens before each block (`ids` and result: int64 [n]). If
        `has_eod`, also count an end-of-document token for each document that has tokens and ends
        before the block.

        Raises: CacheError.
        """
        counts = self._blocks.take("running", np.asarray(ids, np.int64))
        tokens: Int64s = counts[0] + counts[2] if has_eod else counts[0]
        return tokens

    def find_blocks(self, name: str, span: range, values: Int64s) -> Int64s:
        """Find, for each value, the last block of `span` at whose start a running count is at most
        that value.

        Args:
            name: name of the running count, such as "tokens_before".
            values: int64 [n], each at least the count before the span's first block, and less than
                the count after its last block.

        Returns: int64 [n], block numbers.
        Raises: CacheError.
        """
        return self._blocks.find_last("running", name, span, values)

    @cached_property
    def _before_files(self) -> Int64s:
        """The number of tokens, and of counted documents, before each file: int64 [2, num_files +
        1]."""
        return self._blocks.take("running", self.files.first_block)[:2]

    @cached_property
    def _counted(self) -> npt.NDArray[np.bool_]:
        """Whether the documents of each file were counted: bool [num_files]."""
        # From the manifest, since `columns` would make an entry for each of possibly thousands of
        # sources
        counted = np.array(list(map(itemgetter("documents"), self._records)))
        return counted[self.files.columns]


def _measure(
    records: Sequence[Mapping[str, Any]], first_block: Int64s, blocks: CheckedTable
) -> tuple[Int64s, Int64s]:
    """Measure the columns of a snapshot.

    Returns: the first block of each column and the block after its last one, int64 [num_columns,
        2]; and the numbers of tokens, rows and ends of each column, int64 [3, num_columns].
    Raises: CacheError.
    """
    edges = running_totals(list(map(itemgetter("num_files"), records)))
    bounds = np.stack([first_block[edges[:-1]], first_block[edges[1:]]], axis=1)
    counts = blocks.take("running", bounds.reshape(-1)).reshape(len(RUNNING), -1, 2)
    return bounds, counts[..., 1] - counts[..., 0]


def choose_root(snapshot: Snapshot, name: str, root: str, storage: Storage) -> str:
    """Choose the folder to which a source's file names are relative. Usually this is `root`, the
    folder that the config's paths have in common, since data may have moved.

    If paths were added to the config after the index was built, the config's root may be another
    folder, in which the files are not found; then the root that the index recorded is used.
    """
    indexed = snapshot.roots[name]
    if root == indexed:
        return root
    entry = snapshot.sources[snapshot.sources.numbers[name]]
    if not entry.files:
        return root
    first = entry.files.start
    if storage.glob(snapshot.path(first, {name: indexed})) and not storage.glob(
        snapshot.path(first, {name: root})
    ):
        return indexed
    return root


def open_snapshot(cache: CacheLike, digest: str) -> Snapshot:
    """Open a snapshot, given its digest.

    Raises: CacheError if it does not exist, is incomplete, or was written by a newer version.
    """
    store = find_store(cache)
    folder = store.fetch_folder(SNAPSHOTS, digest)
    store.fetch_folder(CHECKSUMS, digest)
    store.fetch_files("splits", [digest])
    try:
        snapshot = _open_folder(store, folder)
    except DamagedCacheError as error:
        if not store.has_folder(SNAPSHOTS, digest):
            known = ", ".join(list_snapshots(store)) or "none"
            raise CacheError(
                f"{store.location}/generations/{digest}: this version of the index does not exist (existing ones: {known}); "
                f"{REBUILD_REMEDY}"
            ) from None
        # If the folder is this node's copy, the original in the cache's store may be undamaged
        snapshot = _open_folder(store, store.fetch_folder(SNAPSHOTS, digest, is_fresh=True))
        LOG.warning("%s; this node's copy was downloaded again", error.problem)
    if any(map(attrgetter("has_group_digests"), map(get_format, snapshot.sources.formats))):
        store.fetch_files("idx")
    return snapshot


def find_damaged_files(folder: Path) -> list[str]:
    """Read all files of a snapshot, and return a line for each damaged table. Raises: CacheError if
    a file that is not a table is damaged."""
    manifest = read_snapshot_manifest(folder)
    damaged = damaged_tables(folder, manifest)
    read_roots(folder)
    read_seen(folder, manifest["num_files"])
    read_ranges(folder, manifest["num_files"])
    return damaged


def _open_again(store: CacheStore, digest: str) -> Snapshot:
    """Open a snapshot again when it is unpickled. No requests are sent to the store if this node
    has the snapshot's files."""
    folder = store.folder / "generations" / digest
    if (folder / MANIFEST).is_file():
        return _open_folder(store, folder)
    return open_snapshot(store, digest)


def _open_folder(store: CacheStore, folder: Path) -> Snapshot:
    manifest = read_snapshot_manifest(folder)
    check_sizes(folder, manifest["tables"])
    # The table of files is read completely and not verified later; checking the larger ones here
    # would take too long.
    if checksum(f"{folder}/{FILES}") != manifest["tables"][FILES]["blake2b"]:
        raise DamagedCacheError.of(f"{folder / FILES}: damaged table: its checksum is wrong")
    last_build = read_roots(folder)
    roots = last_build["roots"]
    is_supported = dict[str, bool]()
    for entry in manifest["sources"]:
        name = entry["name"]
        format_name = entry["format"]
        if not isinstance(roots.get(name), str):
            raise DamagedCacheError.of(
                f"{folder / ROOTS}: does not contain the folder of source {name!r}"
            )
        if format_name not in is_supported:
            is_supported[format_name] = find_format(format_name) is not None
        if not is_supported[format_name]:
            raise CacheError(
                f"{folder / MANIFEST}: source {name!r} has format {format_name!r}, which this megablend "
                "does not support; install the version or the package that wrote it, or build again"
            )
    with reading(folder):
        return Snapshot(folder, manifest, last_build, store)
