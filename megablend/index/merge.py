"""Merging the fragments of all files, in source and file order, into one snapshot, and committing it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from megablend.caches.base import SNAPSHOTS, CacheStore
from megablend.errors import CacheError
from megablend.fs.atomic_write import (
    temp_sibling,
    translate_os_errors,
    write_flushed,
)
from megablend.index.cache_folders import snapshots
from megablend.index.file_versions import number_of, seen_bytes
from megablend.index.list_snapshots import build_sequence
from megablend.index.manifest import (
    MANIFEST,
    ROOTS,
    SEEN,
    TOKEN_RANGES,
    damaged_tables,
    dump_with_checksum,
    read_snapshot_manifest,
)
from megablend.index.packs import FileFacts
from megablend.index.source_spec import SourceColumn
from megablend.index.token_ranges import pack_ranges
from megablend.index.write_tables import write_tables

_CONTENT = ("digest", "sources", "values", "num_files", "num_blocks", "num_chunks")
"""Fields of a manifest that define the content: without the version that wrote it, and the tables' bytes, which depend on it."""


def write_snapshot(
    store: CacheStore,
    columns: Sequence[SourceColumn],
    facts: Iterator[FileFacts],
    found_columns: Mapping[str, str | None],
) -> tuple[str, bool]:
    """Merge the indexing results of all files into a snapshot and commit it.

    Only a batch of files is in memory at a time; all tables except the table of files are written batch by batch.

    Args:
        columns: all columns to index, in order.
        facts: indexing result of each file of each column, in order.
        found_columns: for each column (by its name) its name in the files, if known once all facts are consumed; stored with the
            roots.

    Returns: the snapshot's digest, and whether it is new.
    Raises: CacheError if the cache cannot be written; as `facts` does.
    """
    folder = temp_sibling(snapshots(store.folder) / "generation")
    with translate_os_errors(folder):
        folder.mkdir()
        try:
            ranges: list[tuple[int, int] | None] = []
            manifest = write_tables(folder, columns, _collect_ranges(facts, ranges))
            write_flushed(folder / MANIFEST, [dump_with_checksum(manifest)])
            found = {
                "roots": {each.name: each.source.root for each in columns},
                "columns": dict(found_columns),
                "skipped": {each.name: each.source.skipped for each in columns if each.source.skipped},
            }
            seen = np.array([number_of(file.etag) for each in columns for file in each.source.files], np.uint64)
            digest = manifest["digest"]
            sequence = 1 + max((build_sequence(store, each) for each in store.list_folders(SNAPSHOTS)), default=0)
            replaced = {
                SEEN: seen_bytes(digest, seen),
                TOKEN_RANGES: pack_ranges(digest, ranges),
                ROOTS: dump_with_checksum({"arrival": sequence, **found}),
            }
            return digest, store.commit_folder(SNAPSHOTS, digest, folder, replaced, _is_intact)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _collect_ranges(facts: Iterator[FileFacts], ranges: list[tuple[int, int] | None]) -> Iterator[FileFacts]:
    """Pass the facts through, appending their token ranges to `ranges`."""
    for each in facts:
        ranges.append(each.token_range)
        yield each


def _is_intact(final: Path, written: Path) -> bool:
    """Whether the snapshot committed before has the same content as the one just written, and its tables are undamaged."""
    try:
        manifest, expected = read_snapshot_manifest(final), read_snapshot_manifest(written)
        return all(manifest.get(name) == expected[name] for name in _CONTENT) and not damaged_tables(final, manifest)
    except CacheError:
        return False
