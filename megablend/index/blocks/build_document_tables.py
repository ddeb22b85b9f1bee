"""Build document tables. Each rank counts the documents of a share of the files; large files are
divided into ranges of blocks. Rank 0 joins the counts and commits the tables."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megablend.caches.base import DOCUMENTS, CacheStore
from megablend.distributed.base import Communicator
from megablend.index.blocks.block_store import BlockStore
from megablend.index.blocks.document_lengths import (
    LENGTHS_KIND,
    STRETCH_BYTES,
    BlockRange,
    await_lengths,
    count_share,
    owners_of,
    split_into_ranges,
)
from megablend.index.read.document_table import (
    EVERY,
    LENGTH_COLUMNS,
    LENGTHS,
    START_COLUMNS,
    STARTS,
    DocumentTable,
    complete_table,
    fetch_table,
    table_bytes,
    table_key,
)
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.table_folder import commit_tables, is_complete
from megablend.index.tables.tables import TableWriter
from megablend.system.atomic_write import translate_os_errors
from megablend.system.waits import log_slow_wait


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesReport:
    """A summary of building the document tables; the same on all ranks."""

    documents: int
    """Number of documents of all sources that have a table."""
    counted: int
    """Number of documents that this build counted; the others had been counted before."""
    scanned_bytes: int
    """Data bytes that had to be read for counting."""
    table_bytes: int
    """Size of all tables in bytes."""
    seconds: float


def build_tables(
    store: BlockStore,
    sources: Sequence[int],
    *,
    launch: Communicator,
    stretch_bytes: int = STRETCH_BYTES,
) -> TablesReport:
    """Build document tables for sources of an index. The sources are given by number, and their
    documents must have been counted. All ranks must call this function.

    Args:
        stretch_bytes: stored size in bytes of the blocks that a rank counts at a time.

    Raises: DataError, CacheError.
    """
    start = time.monotonic()
    snapshot = store.snapshot
    cache = snapshot.store
    for kind in (DOCUMENTS, LENGTHS_KIND):
        with translate_os_errors(cache.folder):
            (cache.folder / kind).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        missing = dict[int, list[BlockRange]]()
        if launch.rank == 0:
            with translate_os_errors(cache.folder):
                stack.enter_context(cache.hold())
                cache.remove_leftovers()
            missing = _find_missing(snapshot, sources, stretch_bytes)
        missing = launch.bcast(missing)
        counted, scanned_bytes = count_share(
            store, [part for parts in missing.values() for part in parts], launch
        )
        totals = launch.gather((counted, scanned_bytes))
        report = None
        if launch.rank == 0:
            for source, parts in missing.items():
                _commit(cache, table_key(snapshot, source), parts)
            report = TablesReport(
                documents=sum(snapshot.sources[i].rows for i in sources),
                counted=sum(n for n, _ in totals),
                scanned_bytes=sum(size for _, size in totals),
                table_bytes=sum(table_bytes(snapshot, i) or 0 for i in sources),
                seconds=time.monotonic() - start,
            )
        report = launch.bcast(report)
        assert report is not None
        return report


def _find_missing(
    snapshot: Snapshot, sources: Sequence[int], stretch_bytes: int
) -> dict[int, list[BlockRange]]:
    """Find the sources whose table is missing or damaged. Return a dict: number of the source ->
    ranges of blocks to count. Tables of older versions of megablend are completed instead."""
    cache = snapshot.store
    keys = {source: table_key(snapshot, source) for source in sources}
    for folder in cache.list_upgradable(DOCUMENTS):
        if folder.name in keys.values() and is_complete(folder):
            complete_table(folder)
    committed = set(cache.list_folders(DOCUMENTS))
    return {
        source: list(split_into_ranges(snapshot, source, stretch_bytes))
        for source, key in keys.items()
        if key not in committed or not is_complete(fetch_table(snapshot, source))
    }


def _commit(cache: CacheStore, name: str, parts: Sequence[BlockRange]) -> None:
    """Join the document lengths of all ranges of a source into a table, and commit it."""

    def write(folder: Path) -> None:
        _write(cache, folder, parts)
        DocumentTable(folder).write_checks(folder)

    commit_tables(cache, DOCUMENTS, name, write)


def _write(cache: CacheStore, folder: Path, parts: Sequence[BlockRange]) -> None:
    """Write the lengths of the documents and the running counts before every EVERY-th document."""
    cache.fetch_files(LENGTHS_KIND, owners_of(parts))
    tokens = filled = 0
    # Lengths of the last documents so far, fewer than EVERY, whose group is not complete
    pending = np.zeros(0, np.int32)
    with (
        TableWriter(folder / LENGTHS, LENGTH_COLUMNS) as lengths,
        TableWriter(folder / STARTS, START_COLUMNS) as starts,
    ):
        for number, part in enumerate(parts):
            with log_slow_wait(f"{part.name} to become visible"):
                part_lengths = await_lengths(cache, part)
            lengths.append({"tokens": part_lengths})
            pending = np.concatenate([pending, part_lengths])
            is_last = number + 1 == len(parts)
            num_grouped = len(pending) if is_last else len(pending) // EVERY * EVERY
            groups = np.arange(0, num_grouped, EVERY)
            if len(groups):
                grouped = pending[:num_grouped]
                sums = np.add.reduceat(grouped, groups, dtype=np.int64)
                ends = np.add.reduceat(grouped > 0, groups, dtype=np.int64)
                starts.append(
                    {
                        "tokens": tokens + np.cumsum(sums) - sums,
                        "filled": filled + np.cumsum(ends) - ends,
                    }
                )
                tokens = tokens + int(sums.sum())
                filled = filled + int(ends.sum())
            pending = pending[num_grouped:]
        starts.append({"tokens": np.array([tokens]), "filled": np.array([filled])})
        lengths.finish()
        starts.finish()
