"""A snapshot of the index (on disk: a generation): the sources, files and blocks that one build found.

A snapshot is renamed to its final name last, so one with that name is complete. Opening checks the manifest, the table of files
and the sizes of the tables, in constant time for any number of blocks; rows of the larger tables are verified when they are read
(`row_checks`). Apart from its roots, the content of a snapshot is the same for the same data, options and version, independent
of the location and the number of processes of the build. `cache_folders` describes the layout of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.caches.base import CHECKSUMS, SNAPSHOTS, CacheStore
from megablend.caches.find import CacheLike, find_store
from megablend.errors import REBUILD_REMEDY, CacheError, DamagedCacheError
from megablend.formats import find_format, get_format
from megablend.formats.base import has_group_digests
from megablend.fs.atomic_write import checksum, reading
from megablend.index.block_rows import BlockRows
from megablend.index.file_table import FileEntry
from megablend.index.file_versions import read_seen, warn_unknown
from megablend.index.list_snapshots import list_snapshots
from megablend.index.manifest import FILES, MANIFEST, ROOTS, check_sizes, read_roots, read_snapshot_manifest
from megablend.index.row_checks import RUNNING
from megablend.index.source_entry import ColumnEntry, Sources, make_columns
from megablend.index.token_ranges import read_ranges
from megablend.lazy import cached_property
from megablend.storage.location import join


class Snapshot(BlockRows):
    """An opened index. Picklable: the receiving process opens it again.

    Attributes:
        digest: identifies the snapshot; also the name of its folder.
        store: where its cache is kept.
        sources: in the order of the build.
        roots: folder of each source's files, by its name, as of the last build.
        columns: all columns of the sources; column i of the first num_sources contains source i's tokens; extra columns follow.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], found: Mapping[str, Any], store: CacheStore) -> None:
        super().__init__(folder, manifest)
        self.store = store
        self.digest = folder.name
        self.roots: Mapping[str, str] = found["roots"]
        self.sources, self.columns = self._read_columns(manifest["sources"], found)

    def __reduce__(self) -> tuple[Callable[..., Snapshot], tuple[CacheStore, str]]:
        return _open_again, (self.store, self.digest)

    @property
    def cache(self) -> Path:
        """The folder in which the files of its cache are on this node."""
        return self.store.folder

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
            warn_unknown(self.folder)
            return np.zeros(self.num_files, np.uint64)
        return found

    @property
    def token_ranges(self) -> Int64s:
        """int64 [num_files, 2]: smallest and largest token of each file; smallest > largest where unknown. Raises: CacheError."""
        return read_ranges(self.folder, self.num_files)

    def file_names(self) -> list[str]:
        """Names of all files, relative to their sources' roots."""
        return self._files.names()

    def file_keys(self, column: ColumnEntry) -> list[str]:
        """Keys of a column's files; see FileTable.keys."""
        return self._files.keys(column)

    def file_contents(self) -> list[tuple[str, str]]:
        """Digests of the files' contents; see FileTable.contents."""
        return self._files.contents()

    def token_dtypes(self, files: range) -> Sequence[str]:
        """Types of the values in files; see FileTable.token_dtypes."""
        return self._files.token_dtypes(files)

    @property
    def file_columns(self) -> npt.NDArray[np.int32]:
        """int32 [num_files]: index of each file's column."""
        return self._files.columns

    @property
    def file_sizes(self) -> Int64s:
        """int64 [num_files]: bytes of each file; see FileTable.sizes."""
        return self._files.sizes

    @property
    def file_token_bytes(self) -> Int64s:
        """int64 [num_files]: bytes of a token of each file, decoded."""
        return self._files.token_bytes

    def column_of(self, i: int) -> ColumnEntry:
        """The column that file i belongs to. Raises: IndexError."""
        return self.columns[self.file(i).column]

    def path(self, i: int, roots: Mapping[str, str] | None = None) -> str:
        """Path of file i; `roots` (source name -> folder) overrides what the last build recorded."""
        name, column = self._files.name(i), self.columns[self._files.columns[i]]
        return join((roots or {}).get(column.source_name, column.root), name)

    def _read_columns(
        self, records: Sequence[Mapping[str, Any]], found: Mapping[str, Any]
    ) -> tuple[Sources, Sequence[ColumnEntry]]:
        firsts = np.array([record["first_file"] for record in records], np.int64)
        stops = firsts + np.array([record["num_files"] for record in records], np.int64)
        borders = np.stack([self._first_block[firsts], self._first_block[stops]], axis=1)
        counts = self._blocks.take("running", borders.reshape(-1), plainly=True).reshape(len(RUNNING), -1, 2)
        return make_columns(self.folder, records, found, borders, counts[..., 1] - counts[..., 0])


def open_snapshot(cache: CacheLike, digest: str) -> Snapshot:
    """Open a snapshot by its digest.

    Raises: CacheError if it does not exist, is incomplete, or was written by a newer version.
    """
    store = find_store(cache)
    if not store.has_folder(SNAPSHOTS, digest):
        known = ", ".join(list_snapshots(store)) or "none"
        raise CacheError(
            f"{store.location}/generations/{digest}: this version of the index does not exist (existing ones: {known}); "
            f"{REBUILD_REMEDY}"
        )
    folder = store.fetch_folder(SNAPSHOTS, digest)
    store.fetch_folder(CHECKSUMS, digest)
    store.fetch_files("splits", [digest])
    snapshot = _open_folder(store, folder)
    if any(has_group_digests(get_format(name)) for name in snapshot.sources.formats):
        store.fetch_files("idx")
    return snapshot


def _open_again(store: CacheStore, digest: str) -> Snapshot:
    """Open a snapshot in another process, without requests if its node has it."""
    folder = store.folder / "generations" / digest
    return _open_folder(store, folder) if (folder / MANIFEST).is_file() else open_snapshot(store, digest)


def _open_folder(store: CacheStore, folder: Path) -> Snapshot:
    manifest = read_snapshot_manifest(folder)
    check_sizes(folder, manifest["tables"])
    # The table of files is read completely and not verified later; checking the larger ones here would take too long.
    if checksum(f"{folder}/{FILES}") != manifest["tables"][FILES]["blake2b"]:
        raise DamagedCacheError.of(f"{folder / FILES}: damaged table: its checksum is wrong")
    found = read_roots(folder)
    roots, known = found["roots"], dict[str, bool]()
    for entry in manifest["sources"]:
        name, format_name = entry["name"], entry["format"]
        if not isinstance(roots.get(name), str):
            raise DamagedCacheError.of(f"{folder / ROOTS}: does not contain the folder of source {name!r}")
        if format_name not in known:
            known[format_name] = find_format(format_name) is not None
        if not known[format_name]:
            raise CacheError(
                f"{folder / MANIFEST}: source {name!r} has format {format_name!r}, which this megablend "
                "does not support; install the version or the package that wrote it, or build again"
            )
    with reading(folder):
        return Snapshot(folder, manifest, found, store)
