"""Building document tables: ranks divide the files, large ones by ranges of blocks; rank 0 joins and commits.

    <cache>/lengths/<file>-<stretch>   int32, lengths of the documents of a range of blocks; a blake2b digest (16 bytes)

Counts are kept, so that a killed build resumes, and adding one file to ten thousand counts only that one.
Tokens of `.bin/.idx` and Arrow files are not read; Parquet pages are, since rows are encoded in their levels.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.blocks.block_store import BlockStore
from megablend.blocks.document_lengths import count_documents, next_cut
from megablend.caches.base import DOCUMENTS, CacheStore
from megablend.distributed.assign import assign_longest_first
from megablend.distributed.base import Communicator
from megablend.errors import CacheError, UnsupportedFileError
from megablend.fs.atomic_write import (
    checksum,
    replace_file,
    temp_sibling,
    translate_os_errors,
    write_flushed,
)
from megablend.fs.log_waits import log_slow_wait
from megablend.index.document_checks import write_group_checks
from megablend.index.document_table import (
    EVERY,
    LENGTH_COLUMNS,
    LENGTHS,
    START_COLUMNS,
    STARTS,
    DocumentTable,
    fetch_table,
    table_bytes,
    table_key,
)
from megablend.index.manifest import FORMAT_VERSION, MANIFEST, damaged_tables, dump_with_checksum, read_manifest
from megablend.index.mapped_table import MappedTable
from megablend.index.snapshot import Snapshot
from megablend.index.tables import TableWriter

STRETCH_BYTES = 256 << 20
"""Stored bytes of a file's blocks that one rank counts at a time."""
_LONGEST = (1 << 31) - 1
_DIGEST_BYTES = 16
_SEEN_SECONDS = 10.0
_LENGTHS = "lengths"
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesReport:
    """Summary of building the document tables; the same on all ranks."""

    documents: int
    """Documents of all sources that have a table."""
    counted: int
    """Documents counted now; the others were counted before."""
    scanned_bytes: int
    """Data bytes that had to be read for counting."""
    table_bytes: int
    """Size of all tables."""
    seconds: float


class BlockRange(NamedTuple):
    """Blocks of one file."""

    name: str
    """Name of the file for the lengths of their documents."""
    first_block: int
    stop_block: int
    documents: int
    stored_bytes: int


def build_tables(store: BlockStore, sources: Sequence[int], *, launch: Communicator) -> TablesReport:
    """Build the document tables of sources (by number) of an index whose documents were counted. Called by all ranks.

    Raises: DataError, CacheError.
    """
    start, generation = time.monotonic(), store.generation
    cache = generation.store
    for kind in (DOCUMENTS, _LENGTHS):
        with translate_os_errors(cache.folder):
            (cache.folder / kind).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        missing: dict[int, list[BlockRange]] | None = None
        if launch.rank == 0:
            with translate_os_errors(cache.folder):
                stack.enter_context(cache.hold())
                cache.remove_leftovers()
            needed = {table_key(generation, i) for i in sources}
            for folder in cache.list_upgradable(DOCUMENTS):
                if folder.name in needed and _is_whole(folder):
                    DocumentTable(folder).complete()
            committed = set(cache.list_folders(DOCUMENTS))
            missing = {
                i: list(split_into_ranges(generation, i))
                for i in sources
                if table_key(generation, i) not in committed or not _is_whole(fetch_table(generation, i))
            }
        missing = launch.bcast(missing)
        assert missing is not None
        counted, scanned_bytes = _count_share(store, [part for parts in missing.values() for part in parts], launch)
        totals = launch.gather((counted, scanned_bytes))
        report = None
        if launch.rank == 0:
            for source, parts in missing.items():
                _commit(cache, table_key(generation, source), parts)
            report = TablesReport(
                documents=sum(generation.sources[i].rows for i in sources),
                counted=sum(n for n, _ in totals),
                scanned_bytes=sum(size for _, size in totals),
                table_bytes=sum(table_bytes(generation, i) or 0 for i in sources),
                seconds=time.monotonic() - start,
            )
        report = launch.bcast(report)
        assert report is not None
        return report


def _is_whole(folder: Path) -> bool:
    """Whether a table is complete; otherwise it is rebuilt."""
    try:
        return not damaged_tables(folder, read_manifest(folder))
    except CacheError:
        return False


def split_into_ranges(generation: Snapshot, source: int) -> Iterator[BlockRange]:
    """Split a source's blocks at file ends, and within files about every STRETCH_BYTES where a document begins."""
    entry = generation.sources[source]
    for number, key in zip(entry.files, generation.file_keys(entry), strict=True):
        file = generation.file(number)
        blocks = np.arange(file.first_block, file.first_block + file.num_blocks)
        stored = np.cumsum(generation.blocks(blocks)["stored_bytes"], dtype=np.int64)
        edges = file.first_block + 1 + np.flatnonzero(np.diff(stored // STRETCH_BYTES))
        end = file.first_block + file.num_blocks
        cuts = sorted({file.first_block, *(next_cut(generation, int(edge), end) for edge in edges), end})
        for first, stop in pairwise(cuts):
            rows = int(np.diff(generation.running("rows_before", [first, stop]))[0])
            size = int(
                stored[stop - 1 - file.first_block] - (stored[first - 1 - file.first_block] if first > cuts[0] else 0)
            )
            yield BlockRange(f"{key}-{first - file.first_block}", first, stop, rows, size)


def _count_share(store: BlockStore, parts: Sequence[BlockRange], launch: Communicator) -> tuple[int, int]:
    """Count this rank's ranges that were not counted yet. Returns: documents counted, and data bytes read."""
    counted, scanned_bytes, cache = 0, 0, store.generation.store
    for i in assign_longest_first([part.stored_bytes for part in parts], launch.size)[launch.rank]:
        if _read(cache.fetch_file(_LENGTHS, parts[i].name), parts[i]) is not None:
            continue
        lengths = np.empty(parts[i].documents, np.int32)
        first_document = int(store.generation.running("rows_before", [parts[i].first_block])[0])
        for first, found, size in count_documents(store, parts[i].first_block, parts[i].stop_block):
            if found.max(initial=0) > _LONGEST:
                file = int(store.generation.file_of([parts[i].first_block])[0])
                raise UnsupportedFileError(
                    store.generation.path(file, store.roots),
                    f"a document has {found.max():,} tokens; document tables support up to {_LONGEST:,}: split it",
                )
            lengths[first - first_document :][: len(found)] = found
            scanned_bytes += size
        counted += len(lengths)
        data = lengths.astype("<i4").tobytes()
        replace_file(cache.folder / _LENGTHS / parts[i].name, data + _digest(data))
        cache.publish_file(_LENGTHS, parts[i].name)
    return counted, scanned_bytes


def _read(path: Path, part: BlockRange) -> Int32s | None:
    """The lengths of a range's documents; None if they are missing or damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    body, trailer = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if len(body) != 4 * part.documents or _digest(body) != trailer:
        return None
    return np.frombuffer(body, "<i4")


def _awaited(cache: CacheStore, part: BlockRange) -> Int32s:
    """The lengths that a rank has written; on network file systems they may appear some seconds later."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while (found := _read(path := cache.fetch_file(_LENGTHS, part.name), part)) is None:
        if time.monotonic() > deadline:
            raise CacheError(
                f"{path}: a rank wrote these lengths, but rank 0 cannot read them completely: the cache must be on a file "
                "system that all ranks share; choose such a directory, or build with the ranks of one node"
            )
        time.sleep(0.1)
    return found


def _commit(cache: CacheStore, name: str, parts: Sequence[BlockRange]) -> None:
    """Join the ranges' lengths into a table, and commit it."""
    folder = temp_sibling(cache.folder / DOCUMENTS / name)
    with translate_os_errors(folder):
        folder.mkdir()
        try:
            _write(cache, folder, parts)
            sizes = {
                name: {"bytes": (folder / name).stat().st_size, "blake2b": checksum(folder / name)}
                for name in (LENGTHS, STARTS)
            }
            mapped = MappedTable(folder / LENGTHS, LENGTH_COLUMNS), MappedTable(folder / STARTS, START_COLUMNS)
            sizes |= write_group_checks(folder, folder, mapped, EVERY)
            write_flushed(folder / MANIFEST, [dump_with_checksum({"format_version": FORMAT_VERSION, "tables": sizes})])
            cache.commit_folder(DOCUMENTS, name, folder, {}, lambda earlier, _: _is_whole(earlier))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write(cache: CacheStore, folder: Path, parts: Sequence[BlockRange]) -> None:
    tokens = filled = 0
    left = np.zeros(0, np.int32)
    with (
        TableWriter(folder / LENGTHS, LENGTH_COLUMNS) as lengths,
        TableWriter(folder / STARTS, START_COLUMNS) as starts,
    ):
        for number, part in enumerate(parts):
            with log_slow_wait(f"{part.name} to become visible"):
                found = _awaited(cache, part)
            lengths.append({"tokens": found})
            left = np.concatenate([left, found])
            whole = len(left) if number + 1 == len(parts) else len(left) // EVERY * EVERY
            groups = np.arange(0, whole, EVERY)
            if len(groups):
                sums = np.add.reduceat(left[:whole], groups, dtype=np.int64)
                ends = np.add.reduceat(left[:whole] > 0, groups, dtype=np.int64)
                starts.append({"tokens": tokens + np.cumsum(sums) - sums, "filled": filled + np.cumsum(ends) - ends})
                tokens, filled = tokens + int(sums.sum()), filled + int(ends.sum())
            left = left[whole:]
        starts.append({"tokens": np.array([tokens]), "filled": np.array([filled])})
        lengths.finish()
        starts.finish()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
