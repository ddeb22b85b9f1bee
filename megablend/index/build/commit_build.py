"""Finish a build: merge the results of all ranks into a snapshot, commit it, and report changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from megablend.caches.base import SNAPSHOTS, CacheStore
from megablend.errors import CacheError
from megablend.index.build.build_report import BuildReport
from megablend.index.build.file_tasks import FileTask, TaskPart, TaskResult, await_fragment
from megablend.index.build.fragments import Fragment
from megablend.index.build.packs import Packed
from megablend.index.build.source_spec import SourceFile, SourceSpec
from megablend.index.build.write_tables import write_tables
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.index.tables.cache_folders import snapshots
from megablend.index.tables.file_table import pack_ranges
from megablend.index.tables.file_versions import Numbers, numbers_of, seen_bytes
from megablend.index.tables.list_snapshots import build_sequence, list_snapshots
from megablend.index.tables.manifest import (
    MANIFEST,
    ROOTS,
    SEEN,
    TOKEN_RANGES,
    damaged_tables,
    dump_with_checksum,
    read_snapshot_manifest,
)
from megablend.index.tables.row_checks import complete_checks
from megablend.system.atomic_write import (
    replace_file,
    translate_os_errors,
    unfinished_folder,
    write_flushed,
)


class ColumnsTaken:
    """Records, while the files of a build are merged, from which column of the data files each
    source's tokens are read.

    Attributes:
        by_name: name of the column to index -> name of the column in the data files, if known.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, str | None] = {}
        self._first_path: dict[str, str] = {}

    def add(self, indexed: SourceSpec, file: SourceFile, column: str | None) -> None:
        """Record the column from which the tokens of a file are read. Raises: ConfigError if the
        tokens of another file of the source are in a different column."""
        name = indexed.column_name
        # None if the file's format has no columns, or an older version of megablend indexed it
        if column is None:
            return
        first_column = self.by_name.setdefault(name, column)
        first_path = self._first_path.setdefault(name, file.path)
        if first_column != column:
            raise indexed.complaint(
                f"the tokens are in column {first_column!r} of {first_path}, but in {column!r} of {file.path}; list the files "
                "as separate sources, or set `column:` to a column that all of them have"
            )


_CONTENT = ("digest", "sources", "values", "num_files", "num_blocks", "num_chunks")
"""Fields of a manifest that define a snapshot's content. The other fields (the version of megablend
and the bytes of the tables) may differ between snapshots with the same content."""


def write_snapshot(
    store: CacheStore,
    columns: Sequence[SourceSpec],
    fragments: Iterator[Fragment],
    found_columns: Mapping[str, str | None],
) -> tuple[str, bool]:
    """Merge the indexing results of all files into a snapshot and commit it.

    Only a batch of files is in memory at a time; all tables except the table of files are written
    batch by batch.

    Args:
        columns: all columns to index, in order.
        fragments: indexing result of each file of each column, in order.
        found_columns: the mapping ColumnsTaken.by_name, which is stored in roots.json. The mapping
            may be filled while `fragments` is consumed.

    Returns: the snapshot's digest, and whether the snapshot is new.
    Raises: CacheError if the cache cannot be written; the errors of `fragments`.
    """
    path = snapshots(store.folder) / "generation"
    with translate_os_errors(path.parent), unfinished_folder(path) as folder:
        ranges: list[tuple[int, int] | None] = []
        manifest = write_tables(folder, columns, _collect_ranges(fragments, ranges))
        write_flushed(folder / MANIFEST, [dump_with_checksum(manifest)])
        seen = np.array(
            [numbers_of(file.etag)[0] for column in columns for file in column.files], np.uint64
        )
        earlier = (
            build_sequence(store, earlier_digest)
            for earlier_digest in store.list_folders(SNAPSHOTS)
        )
        roots = {
            "arrival": 1 + max(earlier, default=0),
            "roots": {column.column_name: column.root for column in columns},
            "columns": dict(found_columns),
            "skipped": {column.column_name: column.skipped for column in columns if column.skipped},
        }
        digest = manifest["digest"]
        # These files are not part of the digest: they are replaced if the snapshot already exists
        replaced = {
            SEEN: seen_bytes(digest, seen),
            TOKEN_RANGES: pack_ranges(digest, ranges),
            ROOTS: dump_with_checksum(roots),
        }
        return digest, store.commit_folder(SNAPSHOTS, digest, folder, replaced, _is_intact)


def _collect_ranges(
    fragments: Iterator[Fragment], ranges: list[tuple[int, int] | None]
) -> Iterator[Fragment]:
    """Yield the fragments unchanged, and append their token ranges to `ranges`."""
    for fragment in fragments:
        ranges.append(fragment.token_range)
        yield fragment


def _is_intact(committed: Path, written: Path) -> bool:
    """Return whether the snapshot that is already in the cache is undamaged and has the same
    content as the one just written."""
    try:
        manifest = read_snapshot_manifest(committed)
        expected = read_snapshot_manifest(written)
        is_same = all(manifest.get(name) == expected[name] for name in _CONTENT)
        return is_same and not damaged_tables(committed, manifest)
    except CacheError:
        return False


def complete_snapshots(store: CacheStore, newest: str) -> list[str]:
    """Add checksums of rows and versions of files to snapshots that an older version of megablend
    wrote. Runs may use any of these snapshots. Return a note for each damaged one.

    Args:
        newest: digest of the snapshot that was just built.

    Raises: CacheError if the cache cannot be written.
    """
    notes = []
    built = None
    for folder in store.list_upgradable(SNAPSHOTS):
        lacks_seen = not (folder / SEEN).exists()
        if lacks_seen and built is None:
            built = open_snapshot(store, newest)
        try:
            complete_checks(folder)
            if lacks_seen and built is not None:
                seen = _file_versions(open_snapshot(store, folder.name), built)
                replace_file(folder / SEEN, seen_bytes(folder.name, seen))
        except CacheError as error:
            notes.append(str(error))
    return notes


def _file_versions(older: Snapshot, built: Snapshot) -> Numbers:
    """Return the versions that this build found for the files of an older snapshot (uint64
    [num_files]). The version is 0 if the file has changed, or if this build did not find it."""
    versions = dict(zip(_identities(built), built.seen.tolist(), strict=True))
    return np.array([versions.get(identity, 0) for identity in _identities(older)], np.uint64)


def _identities(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """Return the root, name and content of each file. A file has the same tuple in every snapshot
    that contains it."""
    roots = [snapshot.columns[column].root for column in snapshot.files.columns.tolist()]
    rows = zip(roots, snapshot.file_names(), snapshot.files.contents(), strict=True)
    return [(root, name, *contents) for root, name, contents in rows]


def commit_build(
    store: CacheStore,
    columns: Sequence[SourceSpec],
    work: Sequence[FileTask],
    items: Sequence[TaskPart],
    results: Mapping[int, TaskResult],
    packed: Packed,
    notes: Sequence[str],
    *,
    start: float,
) -> BuildReport:
    """Merge the results of all files into a snapshot, commit the snapshot, and return the report of
    the build.

    Args:
        results: the result of each item, by the item's number.
        notes: warnings so far.
        start: `time.monotonic()` when the build began.

    Raises: ConfigError if the files of a source have their tokens in different columns; CacheError.
    """
    previous = _newest(store)
    taken = ColumnsTaken()
    unused_bytes = list[str]()
    loaded = _load_fragments(store, work, packed, taken, unused_bytes)
    digest, created = write_snapshot(store, columns, loaded, taken.by_name)
    damaged_snapshots = complete_snapshots(store, digest)
    sources = [column for column in columns if not column.is_extra]
    files = {(source.name, file.name) for source in sources for file in source.files}
    names = {source.name for source in sources}
    files_before = {(source, name) for source, name in _files(previous) if source in names}
    read = {items[number].number for number, result in results.items() if result.read}
    result_notes = [result.note for _, result in sorted(results.items()) if result.note]
    return BuildReport(
        digest=digest,
        created=created,
        num_files=len(work),
        read=len(read),
        reused=len(work) - len(read),
        changed=tuple(
            f"{task.column.column_name}/{task.file.name}" for task in work if task.changed
        ),
        added=len(files - files_before),
        removed=len(files_before - files),
        scanned_bytes=sum(result.scanned_bytes for result in results.values()),
        seconds=time.monotonic() - start,
        notes=(*notes, *damaged_snapshots, *unused_bytes, *result_notes),
        skipped=tuple(
            f"source {source.name!r}: {path}" for source in sources for path in source.skipped
        ),
        columns={source.name: taken.by_name.get(source.name) for source in sources},
    )


def _load_fragments(
    store: CacheStore,
    work: Sequence[FileTask],
    packed: Packed,
    taken: ColumnsTaken,
    unused_bytes: list[str],
) -> Iterator[Fragment]:
    """Yield the indexing result of each file, in order. At the same time, fill `taken`, and add
    warnings about unused bytes of files to `unused_bytes`."""
    for task in work:
        name = task.fragment
        column = task.column
        fragment = packed.fragment(name) if name in packed else await_fragment(store, name)
        taken.add(column, task.file, fragment.column)
        warning = column.kind.describe_unused_bytes(task.file.path, fragment.blocks, task.file.size)
        if warning is not None:
            unused_bytes.append(warning)
        yield fragment


def _newest(store: CacheStore) -> Snapshot | None:
    """Return the newest snapshot that can be opened, or None if there is none."""
    for digest in reversed(list_snapshots(store)):
        with contextlib.suppress(CacheError):
            return open_snapshot(store, digest)
    return None


def _files(snapshot: Snapshot | None) -> list[tuple[str, str]]:
    """Return the source name and the file name of each file. Files of extra columns are left
    out."""
    if snapshot is None:
        return []
    # Columns with higher numbers are extra ones
    sources = snapshot.sources.names
    files = zip(snapshot.files.columns.tolist(), snapshot.file_names(), strict=True)
    return [(sources[column], name) for column, name in files if column < len(sources)]
