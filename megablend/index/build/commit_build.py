"""The end of a build: the results of all ranks are merged into a snapshot, which is committed, and
changes are reported."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from megablend.caches.base import SNAPSHOTS, CacheStore
from megablend.errors import CacheError
from megablend.index.build.build_report import BuildReport
from megablend.index.build.file_tasks import FileTask, TaskPart, TaskResult, await_fragment
from megablend.index.build.fragments import Fragment, split_name
from megablend.index.build.packs import Packed
from megablend.index.build.source_spec import SourceFile, SourceSpec
from megablend.index.build.write_tables import write_tables
from megablend.index.read.snapshot import Snapshot, open_snapshot
from megablend.index.tables.cache_folders import snapshots
from megablend.index.tables.file_table import pack_ranges
from megablend.index.tables.file_versions import Numbers, number_of, seen_bytes
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
    temp_sibling,
    translate_os_errors,
    write_flushed,
)


class ColumnsTaken:
    """Token columns, collected while the files of a build are merged.

    Attributes:
        by_name: for each column to index (by its name) the column in its files, if known.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, str | None] = {}
        self._first: dict[str, str] = {}

    def add(self, indexed: SourceSpec, file: SourceFile, column: str | None) -> None:
        """Record a file's column. Raises: ConfigError if another file
        of its source has a different one."""
        name = indexed.column_name
        if column is None:  # its format has no columns, or an older version indexed it
            return
        known = self.by_name.setdefault(name, column)
        first = self._first.setdefault(name, file.path)
        if known != column:
            raise indexed.complaint(
                f"the tokens are in column {known!r} of {first}, but in {column!r} of {file.path}: list them as "
                "separate sources, or set `column:` to a column that each of them has"
            )


_CONTENT = ("digest", "sources", "values", "num_files", "num_blocks", "num_chunks")
"""Fields of a manifest that define the content: without the version that wrote it, and the tables'
bytes, which depend on it."""


def write_snapshot(
    store: CacheStore,
    columns: Sequence[SourceSpec],
    fragments: Iterator[Fragment],
    found_columns: Mapping[str, str | None],
) -> tuple[str, bool]:
    """Merge the indexing results of all files into a snapshot and commit it.

    Only a batch of files is in memory at a time;
    all tables except the table of files are written batch by batch.

    Args:
        columns: all columns to index, in order.
        fragments: indexing result of each file of each column, in order.
        found_columns: for each column (by its name) its name in the files, if known once all
            fragments are consumed; stored with the roots.

    Returns: the snapshot's digest, and whether it is new.
    Raises: CacheError if the cache cannot be written; as `fragments` does.
    """
    folder = temp_sibling(snapshots(store.folder) / "generation")
    with translate_os_errors(folder):
        folder.mkdir()
        try:
            ranges: list[tuple[int, int] | None] = []
            manifest = write_tables(folder, columns, _collect_ranges(fragments, ranges))
            write_flushed(folder / MANIFEST, [dump_with_checksum(manifest)])
            found = {
                "roots": {each.column_name: each.root for each in columns},
                "columns": dict(found_columns),
                "skipped": {each.column_name: each.skipped for each in columns if each.skipped},
            }
            seen = np.array(
                [number_of(file.etag) for each in columns for file in each.files], np.uint64
            )
            digest = manifest["digest"]
            sequence = 1 + max(
                (build_sequence(store, each) for each in store.list_folders(SNAPSHOTS)), default=0
            )
            replaced = {
                SEEN: seen_bytes(digest, seen),
                TOKEN_RANGES: pack_ranges(digest, ranges),
                ROOTS: dump_with_checksum({"arrival": sequence, **found}),
            }
            return digest, store.commit_folder(SNAPSHOTS, digest, folder, replaced, _is_intact)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _collect_ranges(
    fragments: Iterator[Fragment], ranges: list[tuple[int, int] | None]
) -> Iterator[Fragment]:
    """Pass the fragments through, appending their token ranges to `ranges`."""
    for each in fragments:
        ranges.append(each.token_range)
        yield each


def _is_intact(final: Path, written: Path) -> bool:
    """Whether the snapshot committed before has the same content as the one just written, and its
    tables are undamaged."""
    try:
        manifest = read_snapshot_manifest(final)
        expected = read_snapshot_manifest(written)
        return all(
            manifest.get(name) == expected[name] for name in _CONTENT
        ) and not damaged_tables(final, manifest)
    except CacheError:
        return False


def complete_snapshots(store: CacheStore, newest: str) -> list[str]:
    """Complete all snapshots, since runs may use them. Returns: a note for each damaged one.

    Args:
        newest: the one just built.

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
                seen = _seen_of(open_snapshot(store, folder.name), built)
                replace_file(folder / SEEN, seen_bytes(folder.name, seen))
        except CacheError as error:
            notes.append(str(error))
    return notes


def _seen_of(older: Snapshot, built: Snapshot) -> Numbers:
    """Versions of an older snapshot's files, uint64 [num_files]; 0 for files that this build did
    not find unchanged."""
    known = dict(zip(_identities(built), built.seen.tolist(), strict=True))
    return np.array([known.get(identity, 0) for identity in _identities(older)], np.uint64)


def _identities(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """Location and content of each file."""
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
    """Merge the results of all files into a snapshot, commit it and report.

    Args:
        results: of each item, by its number.
        notes: warnings so far.
        start: `time.monotonic()` when the build began.

    Raises: ConfigError if the files of a source have their tokens in different columns; CacheError.
    """
    newest = _newest(store)
    taken = ColumnsTaken()
    unused = list[str]()
    digest, created = write_snapshot(
        store, columns, _load_fragments(store, columns, work, packed, taken, unused), taken.by_name
    )
    late_notes = complete_snapshots(store, digest)
    sources = [each for each in columns if not each.is_extra]
    here = {(source.name, file.name) for source in sources for file in source.files}
    names = {source.name for source in sources}
    before = {(source, name) for source, name in _files(newest) if source in names}
    read = {items[number].number for number, result in results.items() if result.read}
    return BuildReport(
        digest=digest,
        created=created,
        num_files=len(work),
        read=len(read),
        reused=len(work) - len(read),
        changed=tuple(
            f"{columns[item.column].column_name}/{item.file.name}" for item in work if item.changed
        ),
        added=len(here - before),
        removed=len(before - here),
        scanned_bytes=sum(result.scanned_bytes for result in results.values()),
        seconds=time.monotonic() - start,
        notes=(
            *notes,
            *late_notes,
            *unused,
            *(note for _, result in sorted(results.items()) if (note := result.note)),
        ),
        skipped=tuple(
            f"source {source.name!r}: {path}" for source in sources for path in source.skipped
        ),
        columns={name: taken.by_name.get(name) for name in (source.name for source in sources)},
    )


def _load_fragments(
    store: CacheStore,
    columns: Sequence[SourceSpec],
    work: Sequence[FileTask],
    packed: Packed,
    taken: ColumnsTaken,
    unused: list[str],
) -> Iterator[Fragment]:
    """The indexing result of each file, in order; fills `taken`, and `unused` with warnings about
    unused bytes of files."""
    for task in work:
        name = task.fragment
        column = columns[task.column]
        answer = split_name(name)[1]
        fragment = packed.fragment(answer) if answer in packed else await_fragment(store, name)
        taken.add(column, task.file, fragment.column)
        warning = column.kind.describe_unused_bytes(task.file.path, fragment.blocks, task.file.size)
        if warning is not None:
            unused.append(warning)
        yield fragment


def _newest(store: CacheStore) -> Snapshot | None:
    """The newest snapshot that can be opened."""
    for digest in reversed(list_snapshots(store)):
        with contextlib.suppress(CacheError):
            return open_snapshot(store, digest)
    return None


def _files(snapshot: Snapshot | None) -> list[tuple[str, str]]:
    """(source name, file name) of all files."""
    if snapshot is None:
        return []
    sources = snapshot.sources.names  # columns after them are extra ones
    files = zip(snapshot.files.columns.tolist(), snapshot.file_names(), strict=True)
    return [(sources[column], name) for column, name in files if column < len(sources)]
