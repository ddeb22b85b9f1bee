"""Check that a cache has not changed since it was committed, and that its data has not changed
since it was indexed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megablend.caches.base import CHECKSUMS, DOCUMENTS, SNAPSHOTS, CacheStore
from megablend.caches.find import CacheLike, find_existing
from megablend.errors import CacheError
from megablend.index.build.build_report import Progress
from megablend.index.build.fragments import read_fragment
from megablend.index.build.packs import Pack
from megablend.index.read.idx_digests import damaged_digests
from megablend.index.read.snapshot import Snapshot, find_damaged_files, open_snapshot
from megablend.index.tables.manifest import damaged_tables, read_manifest
from megablend.index.verify.verify_data import (
    SnapshotUse,
    catch_errors,
    if_present,
    list_data_problems,
)
from megablend.storage.base import Storage


def verify(
    cache: CacheLike,
    *,
    data: bool,
    storage: Storage,
    progress: Callable[[Progress], None] | None = None,
    uses: Mapping[str, SnapshotUse] = MappingProxyType({}),
) -> list[str]:
    """Check a whole cache: fragments, packs, document tables, digests of `.idx` files, and
    checksums and totals of all snapshots.

    Args:
        data: whether to also read every block of every file, and compare counts, sampled ranges
            and, if the files or the index have them, checksums.
        storage: the storage that reads the files.
        progress: called as files are read.
        uses: how each snapshot is used, by its digest.

    Returns: one line per problem, which names the file and the position in it.
    Raises: CacheError if there is no cache.
    """
    store = find_existing(cache)
    problems = [
        *catch_errors(_file_kind_problems(store, "fragments", read_fragment)),
        *catch_errors(_file_kind_problems(store, "packs", Pack)),
        *catch_errors(_folder_problems(store, DOCUMENTS, "build again (`megablend build CONFIG`)")),
        *catch_errors(
            _folder_problems(
                store,
                CHECKSUMS,
                "recreate the checksums if you need them (`megablend build CONFIG --checksums`)",
            )
        ),
        *catch_errors(damaged_digests(store)),
    ]
    sound: list[Snapshot] = []
    for entry in store.list_entries(SNAPSHOTS):
        remedy = uses.get(entry.name, SnapshotUse()).repair
        snapshot_problems = catch_errors(
            _snapshot_problems(store, entry.name, sound, remedy), remedy
        )
        problems += if_present(store, SNAPSHOTS, entry.name, snapshot_problems)
    if data:
        problems += catch_errors(list_data_problems(sound, uses, storage, progress))
    return problems


def _snapshot_problems(
    store: CacheStore, digest: str, sound: list[Snapshot], remedy: str
) -> Iterator[str]:
    """Yield the problems of a snapshot, each followed by `remedy`. If its tables are undamaged, add
    the snapshot to `sound`."""
    folder = store.fetch_folder(SNAPSHOTS, digest, is_fresh=True)
    damaged = find_damaged_files(folder)
    yield from (f"{problem}; {remedy}" for problem in damaged)
    # If tables are damaged, further checks of them are meaningless
    if damaged:
        return
    snapshot = open_snapshot(store, digest)
    for problem in _table_problems(snapshot):
        yield f"{folder}: {problem}; {remedy}"
    sound.append(snapshot)


def _file_kind_problems(
    store: CacheStore, kind: str, read: Callable[[Path], object]
) -> Iterator[str]:
    for name in store.list_files(kind):
        problem = _find_problem(store.fetch_file(kind, name), read)
        if problem is not None:
            yield problem


def _folder_problems(store: CacheStore, kind: str, how_to_remake: str) -> Iterator[str]:
    """Yield the problems of all folders of one kind. A folder of this kind can be removed and made
    again."""
    for entry in store.list_entries(kind):
        remedy = f"remove {store.location}/{kind}/{entry.name}, and {how_to_remake}"
        folder_problems = catch_errors(_damaged_tables_of(store, kind, entry.name, remedy), remedy)
        yield from if_present(store, kind, entry.name, folder_problems)


def _damaged_tables_of(store: CacheStore, kind: str, name: str, remedy: str) -> Iterator[str]:
    folder = store.fetch_folder(kind, name, is_fresh=True)
    yield from (f"{problem}; {remedy}" for problem in damaged_tables(folder, read_manifest(folder)))


def _find_problem(path: Path, read: Callable[[Path], object]) -> str | None:
    try:
        read(path)
    except FileNotFoundError:  # just removed by another process
        return None
    except CacheError as error:
        return str(error)
    return None


def _table_problems(snapshot: Snapshot) -> Iterator[str]:
    """Yield the contradictions within a snapshot's tables, such as descending running counts,
    blocks outside their file, or inconsistent totals."""
    for name in ("tokens_before", "rows_before", "ends_before"):
        running = getattr(snapshot, name)
        falls = np.flatnonzero(np.diff(running) < 0)
        if running[0] != 0 or len(falls):
            yield f"{name} does not ascend from 0 (at block {falls[0] if len(falls) else 0})"
    for i in range(snapshot.num_files):
        file = snapshot.files.entry(i)
        blocks = snapshot.blocks(file.blocks)
        stop = blocks["offset"] + blocks["stored_bytes"]
        if len(blocks) and (blocks["offset"].min() < 0 or stop.max() > file.opened.size):
            yield f"{file.name}: a block is outside the file's {file.opened.size} bytes"
        if len(blocks) and (blocks["chunk"].min() < 0 or blocks["chunk"].max() >= file.num_chunks):
            yield f"{file.name}: a block refers to a chunk outside the file's {file.num_chunks} chunks"
        if blocks["tokens"].sum() != file.tokens:
            yield f"{file.name}: its blocks contain {blocks['tokens'].sum()} tokens, but the file has {file.tokens}"
        if snapshot.columns[file.column].documents and blocks["rows"].sum() != file.rows:
            yield f"{file.name}: {blocks['rows'].sum()} documents begin in its blocks, but the file has {file.rows}"
