"""Document tables: the number of tokens of each document of a source, for orders that arrange
single documents.

    <cache>/documents/<digest>/   lengths.arrow   int32, a source's documents in the order of its files
                                  starts.arrow    running counts before every EVERY-th document, and the totals
                                  groups.check.arrow  checksums of EVERY documents and the counts before them: see row_checks.py
                                  manifest.json   sizes and checksums; the folder is renamed to its name last

A table depends only on the files of a source in a snapshot. It is stored outside the snapshots, in
a folder whose name is a digest of these files, so that snapshots with the same files share it. It
takes 4.25 bytes per document. If a table is too large to be read on opening, its whole checksum is
not compared; instead, the checksums of groups of documents are compared when documents are looked
up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from megablend.arrays import Int64s
from megablend.caches.base import DOCUMENTS
from megablend.errors import CacheError, DamagedCacheError
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.manifest import MANIFEST, check_sizes, read_manifest
from megablend.index.tables.mapped_table import MappedTable
from megablend.index.tables.ranged_blocks import RangedBlocks, store_totals
from megablend.index.tables.row_checks import find_wrong, warn_unchecked, write_checks
from megablend.index.tables.sealed_numbers import ComputedNumbers
from megablend.index.tables.table_folder import add_tables
from megablend.kernels.document_table import add_lengths
from megablend.system.atomic_write import checksum, reading
from megablend.system.digest import hex_digest
from megablend.system.log import LOG

VERSION = 1
"""Version of the format, which is part of the name of a table's folder."""
EVERY = 64
"""Number of documents from one running count to the next."""
LENGTHS = "lengths.arrow"
STARTS = "starts.arrow"
GROUP_CHECKS = "groups.check.arrow"
LENGTH_COLUMNS = np.dtype([("tokens", "<i4")])
START_COLUMNS = np.dtype(
    [
        ("tokens", "<i8"),  # tokens of all earlier documents
        # earlier documents with tokens: each of them may get an end-of-document token
        ("filled", "<i8"),
    ]
)
_GROUP = "group"
"""Name of the column that contains the checksums of groups."""
_CHECK_COLUMNS = np.dtype([(_GROUP, "<u4")])
_REBUILD = "`megablend index CONFIG`"
_CHECKED_BYTES = 16 << 20
"""A file up to this size in bytes is compared with its checksum on opening, which takes a few ms.
In larger files, only the rows that are looked up are compared."""
_PASS = 1 << 20
"""Number of documents whose lengths are read at a time."""
_PASS_GROUPS = 1 << 12
"""Number of groups whose checksums are compared at a time."""


class DocumentTable:
    """An opened, memory-mapped document table. It can be pickled: the receiving process opens it
    again. Raises: CacheError."""

    def __init__(self, folder: Path, *, checks: bool = False) -> None:
        """Open a table. `checks` says whether documents are verified when they are looked up."""
        self.folder = folder
        self._lengths = MappedTable(folder / LENGTHS, LENGTH_COLUMNS)
        self._starts = MappedTable(folder / STARTS, START_COLUMNS)
        self.num_documents = self._lengths.num_rows
        self.num_tokens = int(self._starts["tokens"][-1])
        self._checks = MappedTable(folder / GROUP_CHECKS, _CHECK_COLUMNS) if checks else None
        if len(self._starts["tokens"]) != -(-self.num_documents // EVERY) + 1:
            raise self.damaged(
                f"it has {self.num_documents:,} lengths, but {len(self._starts['tokens']):,} running counts"
            )

    def damaged(self, problem: str) -> CacheError:
        """Return an error which says that the table is damaged."""
        return DamagedCacheError.of(f"{self.folder}: damaged table of documents ({problem})")

    def lengths(self, documents: Int64s, *, has_eod: bool) -> Int64s:
        """Return the number of tokens of each document (`documents` and result: int64 [n]). If
        `has_eod`, a document that has tokens counts one more, for its end-of-document token."""
        self._verify(documents)
        lengths: Int64s = self._lengths.take("tokens", documents).astype(np.int64)
        if has_eod:
            lengths += lengths > 0
        return lengths

    def before(self, documents: Int64s, *, has_eod: bool) -> Int64s:
        """Return the number of tokens before each document.

        Args:
            documents: int64 [n], numbers from 0 to num_documents.

        Returns: int64 [n].
        Raises: CacheError if lengths and running counts near one of the documents do not agree.
        """
        self._verify(documents)
        marks = documents // EVERY
        last = len(self._starts["tokens"]) - 1
        before = self._running_counts(marks, has_eod=has_eod)
        counts = self._running_counts(np.minimum(marks + 1, last), has_eod=has_eod) - before
        # The kernel adds the lengths of documents between a running count and the document
        for part in self._lengths.portions(documents):
            wrong = add_lengths(
                self._lengths["tokens"],
                EVERY,
                int(has_eod),
                documents[part],
                counts[part],
                before[part],
            )
            if wrong >= 0:
                raise self.damaged(
                    f"lengths and running counts around document {documents[part][wrong]:,} do not agree"
                )
        return before

    def write_checks(self, folder: Path) -> None:
        """Compute the checksums of the table, and write them to a folder."""
        num_groups = len(self._starts["tokens"]) - 1
        write_checks(
            folder / GROUP_CHECKS,
            _CHECK_COLUMNS,
            num_groups,
            lambda _, groups: self._group_values(groups),
        )

    def _verify(self, documents: Int64s) -> None:
        if self._checks is None or not self.num_documents:
            return
        last = len(self._starts["tokens"]) - 2
        groups = np.unique(np.minimum(documents // EVERY, last))
        for start in range(0, len(groups), _PASS_GROUPS):
            part = groups[start : start + _PASS_GROUPS]
            wrong = find_wrong(self._checks, _GROUP, part, self._group_values(part))
            if wrong is not None:
                first = wrong * EVERY
                raise self.damaged(
                    f"documents from {first:,} on do not match their checksum in {GROUP_CHECKS}"
                )

    def _group_values(self, groups: Int64s) -> Int64s:
        """Return the values that the checksums of groups cover. For each group, these are the two
        running counts, then the lengths, with two lengths in each number (`groups`: int64 [n];
        result: int64 [2 + EVERY / 2, n])."""
        # Shape: groups, documents of a group
        documents = groups[:, np.newaxis] * EVERY + np.arange(EVERY)
        inside = documents < self.num_documents
        lengths = np.zeros(documents.shape, np.int32)
        lengths[inside] = self._lengths.take("tokens", documents[inside])
        values = np.empty((2 + EVERY // 2, len(groups)), np.int64)
        values[0] = self._starts.take("tokens", groups)
        values[1] = self._starts.take("filled", groups)
        values[2:] = lengths.view(np.int64).T
        return values

    def _running_counts(self, marks: Int64s, *, has_eod: bool) -> Int64s:
        """Return the number of tokens before document EVERY * mark for each of `marks`, as a new
        array (both int64 [n])."""
        counts: Int64s = self._starts.take("tokens", marks)
        return counts + self._starts.take("filled", marks) if has_eod else counts

    def __reduce__(self) -> tuple[Callable[..., DocumentTable], tuple[Path]]:
        return _open, (self.folder,)


def complete_table(folder: Path) -> None:
    """Add the checksums of groups to a table that an older version of megablend wrote without them.
    The table must be undamaged. Raises: CacheError."""
    if GROUP_CHECKS not in read_manifest(folder)["tables"]:
        add_tables(folder, DocumentTable(folder).write_checks)


class PartDocuments(RangedBlocks):
    """Documents of a source, in one or more ranges, as orders see them: each document is
    represented as a block."""

    def __init__(self, table: DocumentTable, ranges: Sequence[range], *, has_eod: bool) -> None:
        edges = np.array([[part.start, part.stop] for part in ranges], np.int64).reshape(-1, 2)
        self._starts, stops = table.before(edges.reshape(-1), has_eod=has_eod).reshape(-1, 2).T
        super().__init__(edges[:, 0], edges[:, 1] - edges[:, 0], stops - self._starts)
        self._table = table
        self._edges = edges
        self._has_eod = has_eod

    def before(self, blocks: Int64s) -> Int64s:
        """See RangedBlocks.before. Raises: CacheError."""
        ranges = self._find_ranges(blocks)
        documents = self._firsts[ranges] + blocks - self._offsets[ranges]
        in_source = self._table.before(documents, has_eod=self._has_eod)
        tokens: Int64s = self._tokens_before[ranges] + in_source - self._starts[ranges]
        return tokens

    def _count_groups(self, num_groups: int, run: int) -> Int64s:
        """Count the tokens of each group by reading each length once, in file order."""
        totals = np.zeros(num_groups, np.int64)
        for start in range(0, self.num_blocks, _PASS):
            documents = np.arange(start, min(start + _PASS, self.num_blocks))
            lengths = self._table.lengths(self.index_blocks(documents), has_eod=self._has_eod)
            np.add.at(totals, documents // run % num_groups, lengths)
        if int(totals.sum()) != self.num_tokens:
            raise self._table.damaged(
                f"its documents have {totals.sum():,} tokens, but {self.num_tokens:,} were counted"
            )
        return totals

    def _stored_totals(self, num_groups: int, run: int) -> ComputedNumbers:
        folder = self._table.folder
        parts = [*self._edges.reshape(-1).tolist(), self._has_eod, num_groups, run]
        return store_totals(folder.parent.parent, folder.name, parts)


def table_key(snapshot: Snapshot, source: int) -> str:
    """Return the name of the folder for the document table of a source. The source is given by its
    number. The table may not exist."""
    key = [VERSION, *snapshot.files.keys(snapshot.sources[source])]
    return hex_digest(json.dumps(key))


def fetch_table(snapshot: Snapshot, source: int) -> Path:
    """Fetch the document table of a source, given by its number, to this node, and return the
    folder of the table. The folder does not exist if the cache has no such table. Raises:
    CacheError."""
    store = snapshot.store
    key = table_key(snapshot, source)
    folder = store.folder / DOCUMENTS / key
    if not (folder / MANIFEST).is_file():
        store.fetch_folder(DOCUMENTS, key)
        store.fetch_files("splits", [key])
    return folder


def table_bytes(snapshot: Snapshot, source: int) -> int | None:
    """Return the size in bytes of a source's document table, or None if the source has none."""
    folder = fetch_table(snapshot, source)
    if not (folder / MANIFEST).is_file():
        return None
    return sum(path.stat().st_size for path in folder.iterdir())


def open_table(snapshot: Snapshot, source: int) -> DocumentTable:
    """Open the document table of a source of a snapshot.
    Raises: CacheError if it is missing or damaged."""
    entry = snapshot.sources[source]
    folder = fetch_table(snapshot, source)
    if not (folder / MANIFEST).is_file():
        raise CacheError(
            f"{folder}: source {entry.name!r} has no document table; rebuild the index ({_REBUILD})"
        )
    try:
        table = _open(folder)
    except DamagedCacheError as error:
        # If the folder is this node's copy, the original in the cache's store may be undamaged
        table = _open(snapshot.store.fetch_folder(DOCUMENTS, folder.name, is_fresh=True))
        LOG.warning("%s; this node's copy was downloaded again", error.problem)
    if (table.num_documents, table.num_tokens) != (entry.rows, entry.tokens):
        raise CacheError(
            f"{folder}: the table has {table.num_documents:,} documents and {table.num_tokens:,} "
            f"tokens, but source {entry.name!r} has {entry.rows:,} and {entry.tokens:,}: remove "
            f"that folder, then rebuild the index ({_REBUILD})"
        )
    return table


def _open(folder: Path) -> DocumentTable:
    """Open the table that is in a folder now, since a build may have replaced a damaged one."""
    with reading(folder):
        state = (folder / MANIFEST).stat()
    return _open_once(folder, (state.st_ino, state.st_mtime_ns, state.st_ctime_ns))


@lru_cache(maxsize=256)
def _open_once(folder: Path, version: tuple[int, int, int]) -> DocumentTable:
    """Open one version of a table. The result is cached, so that all splits and datasets of a
    process share a mapping."""
    tables = read_manifest(folder)["tables"]
    check_sizes(folder, tables)
    is_large = False
    for name, entry in tables.items():
        if entry["bytes"] > _CHECKED_BYTES:
            is_large = True
        elif checksum(folder / name) != entry["blake2b"]:
            raise DamagedCacheError.of(f"{folder / name}: damaged table (its checksum is wrong)")
    if is_large and GROUP_CHECKS not in tables:
        warn_unchecked(folder)
    return DocumentTable(folder, checks=is_large and GROUP_CHECKS in tables)
