"""Document tables: the number of tokens of each document of a source, for orders that arrange single documents.

    <cache>/documents/<digest>/   lengths.arrow   int32, a source's documents in the order of its files
                                  starts.arrow    running counts before every EVERY-th document, and the totals
                                  groups.check.arrow  see document_checks.py
                                  manifest.json   sizes and checksums; the folder is renamed to its name last

A table depends only on the files of a source in a snapshot, so it is stored outside the snapshots, under a key of these files;
snapshots with the same files share it. It takes 4.25 bytes per document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from megablend.arrays import Int64s
from megablend.caches.base import DOCUMENTS
from megablend.errors import CacheError, DamagedCacheError
from megablend.fs.atomic_write import checksum, reading
from megablend.index.checked_table import warn_unchecked
from megablend.index.document_checks import (
    GROUP_CHECKS,
    GROUP_COLUMNS,
    complete_group_checks,
    find_wrong_group,
)
from megablend.index.group_totals import load_group_totals, save_group_totals
from megablend.index.manifest import MANIFEST, read_manifest
from megablend.index.mapped_table import MappedTable
from megablend.index.snapshot import Snapshot
from megablend.kernels.document_table import add_lengths

VERSION = 1
"""Version of the format; part of the key."""
EVERY = 64
"""Documents between running counts."""
LENGTHS, STARTS = "lengths.arrow", "starts.arrow"
LENGTH_COLUMNS = np.dtype([("tokens", "<i4")])
START_COLUMNS = np.dtype(
    [
        ("tokens", "<i8"),  # of all documents before
        ("filled", "<i8"),  # documents before that have tokens: each of them may get an end-of-document token
    ]
)
_CHECKED_BYTES = 16 << 20
"""Up to this size, a file is compared with its checksum on opening, in a few ms; in larger files only looked-up rows are."""
_PASS = 1 << 20
"""Documents per pass of reading lengths."""


class DocumentTable:
    """An opened table, memory-mapped. Picklable: the receiving process opens it again. Raises: CacheError."""

    def __init__(self, folder: Path, *, checks: bool = False) -> None:
        """Args: checks: verify documents when they are looked up."""
        self.folder = folder
        self._lengths, self._starts = (
            MappedTable(folder / LENGTHS, LENGTH_COLUMNS),
            MappedTable(folder / STARTS, START_COLUMNS),
        )
        self.num_documents = len(self._lengths["tokens"])
        self.num_tokens = int(self._starts["tokens"][-1])
        self._checks = MappedTable(folder / GROUP_CHECKS, GROUP_COLUMNS) if checks else None
        if len(self._starts["tokens"]) != -(-self.num_documents // EVERY) + 1:
            raise self.damaged(f"{self.num_documents:,} lengths, {len(self._starts['tokens']):,} running counts")

    def damaged(self, problem: str) -> CacheError:
        """An error about the content of the table."""
        return DamagedCacheError.of(f"{self.folder}: damaged table of documents ({problem})")

    def lengths(self, documents: Int64s, *, eod: bool) -> Int64s:
        """Tokens of each of `documents` int64 [n]; with `eod`, plus one for each document that has tokens: int64 [n]."""
        self._verify(documents)
        found: Int64s = self._lengths.take("tokens", documents).astype(np.int64)
        if eod:
            found += found > 0
        return found

    def before(self, documents: Int64s, *, eod: bool) -> Int64s:
        """Tokens before each of `documents` int64 [n], which are from 0 to num_documents: int64 [n].

        Raises: CacheError if lengths and running counts near one of them do not agree.
        """
        self._verify(documents)
        marks = documents // EVERY
        last = len(self._starts["tokens"]) - 1
        starts = self._counted(marks, eod=eod)
        counts = self._counted(np.minimum(marks + 1, last), eod=eod) - starts
        for part in self._lengths.portions(documents):
            asked = documents[part], counts[part], starts[part]
            wrong = add_lengths(self._lengths["tokens"], EVERY, int(eod), *asked)
            if wrong >= 0:
                raise self.damaged(f"lengths and running counts around document {asked[0][wrong]:,} do not agree")
        return starts

    def complete(self) -> None:
        """Write the checksums if a table of an older version has none. Raises: CacheError."""
        complete_group_checks(self.folder, (self._lengths, self._starts), EVERY)

    def _verify(self, documents: Int64s) -> None:
        if self._checks is None or not self.num_documents:
            return
        wrong = find_wrong_group(self._checks, self._lengths, self._starts, EVERY, documents)
        if wrong is not None:
            raise self.damaged(f"documents from {wrong * EVERY:,} on do not match their checksum in {GROUP_CHECKS}")

    def _counted(self, marks: Int64s, *, eod: bool) -> Int64s:
        """A new array of the running counts at `marks` int64 [n]: int64 [n]."""
        counts: Int64s = self._starts.take("tokens", marks)
        return counts + self._starts.take("filled", marks) if eod else counts

    def __reduce__(self) -> tuple[Callable[..., DocumentTable], tuple[Path]]:
        return _open, (self.folder,)


class PartDocuments:
    """Ranges of a source's documents, as an order sees them: each as if it were a block, numbered from 0."""

    def __init__(self, table: DocumentTable, ranges: Sequence[range], *, eod: bool) -> None:
        self._table, self._ranges, self._eod = table, tuple(ranges), eod
        self._firsts = np.array([each.start for each in ranges], np.int64)
        self._offsets = np.concatenate([[0], np.cumsum([len(each) for each in ranges])])
        self.num_blocks = int(self._offsets[-1])
        edges = np.array([[each.start, each.stop] for each in ranges], np.int64).reshape(-1)
        self._starts, stops = table.before(edges, eod=eod).reshape(-1, 2).T
        self._tokens_before = np.concatenate([[0], np.cumsum(stops - self._starts)])
        self.num_tokens = int(self._tokens_before[-1])

    def before(self, blocks: Int64s) -> Int64s:
        """Tokens before each of `blocks`, which are documents, int64 [n]: int64 [n]."""
        which = self._ranges_of(blocks)
        inside = self._table.before(self._firsts[which] + blocks - self._offsets[which], eod=self._eod)
        starts: Int64s = self._tokens_before[which] + inside - self._starts[which]
        return starts

    def table_rows(self, documents: Int64s) -> Int64s:
        """The documents' numbers in the source, int64 [n]."""
        which = self._ranges_of(documents)
        rows: Int64s = self._firsts[which] + documents - self._offsets[which]
        return rows

    def find_local(self, rows: Int64s) -> Int64s:
        """The documents here with these numbers in the source, or the next ones after them: int64, of the same shape."""
        which = np.maximum(np.searchsorted(self._firsts, rows, side="right") - 1, 0)
        inside = np.maximum(rows - self._firsts[which], 0)
        local: Int64s = np.minimum(self._offsets[which] + inside, self._offsets[which + 1])
        return local

    def group_totals(self, num_groups: int, run: int) -> Int64s:
        """Tokens of each group, int64 [num_groups]; see Blocks.group_totals. Fast if they are stored. Raises: CacheError."""
        totals = load_group_totals(self._cache(), self._named(num_groups, run), num_groups)
        return self._count(num_groups, run) if totals is None else totals

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        """Store the result of `group_totals` in the cache. Raises: CacheError."""
        named = self._named(num_groups, run)
        if load_group_totals(self._cache(), named, num_groups) is None:
            save_group_totals(self._cache(), named, self._count(num_groups, run))

    def _ranges_of(self, documents: Int64s) -> Int64s:
        """The range that has each document; the last one for num_blocks: int64 [n]."""
        if len(self._ranges) == 1:
            return np.zeros(len(documents), np.int64)
        which: Int64s = np.searchsorted(self._offsets, documents, side="right") - 1
        return np.minimum(which, len(self._ranges) - 1)

    def _count(self, num_groups: int, run: int) -> Int64s:
        """Count the tokens of each group; each length is read once, in file order."""
        totals = np.zeros(num_groups, np.int64)
        for start in range(0, self.num_blocks, _PASS):
            documents = np.arange(start, min(start + _PASS, self.num_blocks))
            lengths = self._table.lengths(self.table_rows(documents), eod=self._eod)
            np.add.at(totals, documents // run % num_groups, lengths)
        if int(totals.sum()) != self.num_tokens:
            raise self._table.damaged(f"its documents have {totals.sum():,} tokens, {self.num_tokens:,} were counted")
        return totals

    def _named(self, num_groups: int, run: int) -> list[object]:
        edges = [edge for each in self._ranges for edge in (each.start, each.stop)]
        return [self._table.folder.name, *edges, self._eod, num_groups, run]

    def _cache(self) -> Path:
        return self._table.folder.parent.parent


def table_key(snapshot: Snapshot, source: int) -> str:
    """The name of the table of a source of a snapshot, which may not exist."""
    asked = [VERSION, *snapshot.file_keys(snapshot.sources[source])]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()


def fetch_table(snapshot: Snapshot, source: int) -> Path:
    """The folder of the table of a source of a snapshot; if there is none, nothing is at the path. Raises: CacheError."""
    store, key = snapshot.store, table_key(snapshot, source)
    folder = store.folder / DOCUMENTS / key
    if not (folder / MANIFEST).is_file():
        store.fetch_folder(DOCUMENTS, key)
        store.fetch_files("splits", [key])
    return folder


def table_bytes(snapshot: Snapshot, source: int) -> int | None:
    """Size of a source's document table in bytes; None if it has none."""
    folder = fetch_table(snapshot, source)
    return sum(path.stat().st_size for path in folder.iterdir()) if (folder / MANIFEST).is_file() else None


def open_table(snapshot: Snapshot, source: int) -> DocumentTable:
    """Open the document table of a source of a snapshot. Raises: CacheError if it is missing or damaged."""
    entry, folder = snapshot.sources[source], fetch_table(snapshot, source)
    if not (folder / MANIFEST).is_file():
        raise CacheError(
            f"{folder}: source {entry.name!r} has no document table; rebuild the index (`megablend index CONFIG`)"
        )
    table = _open(folder)
    if (table.num_documents, table.num_tokens) != (entry.rows, entry.tokens):
        raise CacheError(
            f"{folder}: the table has {table.num_documents:,} documents and {table.num_tokens:,} tokens, source {entry.name!r} "
            f"{entry.rows:,} and {entry.tokens:,}: remove that folder, then rebuild the index (`megablend build CONFIG`)"
        )
    return table


def _open(folder: Path) -> DocumentTable:
    """The current table in a folder: a build may have replaced a damaged one."""
    with reading(folder):
        state = (folder / MANIFEST).stat()
    return _open_once(folder, (state.st_ino, state.st_mtime_ns, state.st_ctime_ns))


@lru_cache(maxsize=256)
def _open_once(folder: Path, version: tuple[int, int, int]) -> DocumentTable:
    """One memory map per version of the table, shared by all splits and datasets of a process."""
    committed_tables = read_manifest(folder)["tables"]
    is_large = False
    for name, committed in committed_tables.items():
        with reading(folder / name):
            size = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if size != committed["bytes"]:
            raise DamagedCacheError.of(f"{folder / name}: has {size} bytes, {committed['bytes']} were committed")
        if size > _CHECKED_BYTES:
            is_large = True
        elif checksum(folder / name) != committed["blake2b"]:
            raise DamagedCacheError.of(f"{folder / name}: damaged table (its checksum is wrong)")
    if is_large and GROUP_CHECKS not in committed_tables:
        warn_unchecked(folder)
    return DocumentTable(folder, checks=is_large and GROUP_CHECKS in committed_tables)
