"""Readers of an index's files: each opened when first needed,
if it is still the file that was indexed."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from megablend.errors import ChangedFileError, CorruptFileError, UnsupportedFileError
from megablend.formats.base import Array, BlockReader
from megablend.formats.fetch import Check
from megablend.index.read.block_checksums import Sums, find_wrong, open_checksums, place_in_sums
from megablend.index.read.idx_digests import read_digests
from megablend.index.read.joined_snapshot import JoinedSnapshot
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.file_table import FileEntry
from megablend.index.tables.file_versions import check_body, join_etags, number_of, warn_moved
from megablend.lazy import cached_property
from megablend.lru import LRUCache
from megablend.storage.base import Bytes, Storage
from megablend.storage.hints import distrust
from megablend.storage.location import find_scheme
from megablend.storage.ranges import FetchedRanges
from megablend.system.log import LOG

MAX_READS = 8
"""Times that a range is read before it counts as damaged."""
MAX_OPENS = 20
"""Times that a file is opened whose description differs from the index's: that takes several
reads."""
T = TypeVar("T")


class Checksums:
    """The checksums of an index, of several snapshots if it is joined. Raises: CacheError if
    they are damaged."""

    def __init__(self, snapshot: Snapshot) -> None:
        parts = snapshot.snapshots if isinstance(snapshot, JoinedSnapshot) else (snapshot,)
        self._parts = [(each.num_files, open_checksums(each)) for each in parts]

    def find(self, number: int) -> Sums | None:
        """The ranges of a file by its number; None if there are no checksums."""
        for num_files, checksums in self._parts:
            if number < num_files:
                return None if checksums is None else checksums.of_file(number)
            number -= num_files
        return None


def open_again(path: str, open_file: Callable[[], T]) -> T:
    """Open a file; if its description is not what was indexed
    and it is not on a local disk, open it again.

    Raises: as `open_file` does, after MAX_OPENS times.
    """
    for _ in range(MAX_OPENS - 1 if find_scheme(path) else 0):
        with suppress(ChangedFileError, CorruptFileError, UnsupportedFileError):
            return open_file()
    return open_file()


class FetchedCheck:
    """Compares what was fetched of an indexed file, and replaces ranges that differ.

    Args:
        paths: of the files that belong to it, see `Format.files`.
        sums: their ranges.
        storage: reads ranges again.
    """

    def __init__(self, paths: Sequence[str], sums: Sums, storage: Storage) -> None:
        self._paths = list(paths)
        self._sums = sums
        self._storage = storage

    def __call__(self, fetched: FetchedRanges) -> None:
        """Raises: CorruptFileError if a range differs each time it is read; as Storage.read
        does."""
        path = fetched.ranges.path
        position = self._paths.index(path)
        wrong = list[tuple[int, Bytes]]()
        for i, offset in enumerate(fetched.ranges.offsets.tolist()):
            wrong += self._find_wrong(position, offset, fetched[i])
        for _ in range(MAX_READS - 1):
            if not wrong:
                return
            LOG.info(
                "%s: %d ranges differ from their checksums; reading them again", path, len(wrong)
            )
            self._read_again(path, wrong)
            wrong = [each for part in wrong for each in self._find_wrong(position, *part)]
        if wrong:
            offset, data = wrong[0]
            raise CorruptFileError(
                path,
                f"{len(data)} bytes differ from their checksum in the index, {MAX_READS} times in "
                "a row: restore the file; or, if the checksums were made from a wrong file, remove "
                "the cache's folder `checksums` and run `megablend build CONFIG --checksums`",
                offset=offset,
            )

    def _find_wrong(self, position: int, offset: int, data: Bytes) -> list[tuple[int, Bytes]]:
        """Ranges that differ, with their bytes."""
        found = find_wrong(self._sums, place_in_sums(position, offset), data)
        return [(offset + start, data[start : start + size]) for start, size in found]

    def _read_again(self, path: str, parts: Sequence[tuple[int, Bytes]]) -> None:
        offsets, sizes = (
            np.array(each, np.int64)
            for each in zip(*((o, len(data)) for o, data in parts), strict=True)
        )
        distrust(self._storage, path, offsets, sizes)
        data, begins = self._storage.read_ranges(
            path, offsets, sizes, lambda total: np.empty(total, np.uint8)
        )
        for (_, part), begin in zip(parts, begins.tolist(), strict=True):
            part[:] = data[begin : begin + len(part)]


MIN_OPEN_FILES = 1 << 10
MAX_OPEN_FILES = 1 << 14
"""Number of readers that are always kept, since opening a file reads its footer; the storage limits
descriptors."""
OPEN_BYTES = 32 << 20
"""Memory for readers, if that allows for more than MIN_OPEN_FILES."""
_READER_BYTES = 2 << 10
"""Memory of a reader besides its tables."""


class OpenedReader(NamedTuple):
    """An opened file."""

    reader: BlockReader
    chunks: Array
    """CHUNK_DTYPE [num_chunks], the file's."""
    check: Check | None
    """Compares what was fetched with checksums."""
    retry_storage: Storage | None
    """Fetches damaged bytes once more; see FileRead."""


class OpenFiles:
    """Readers by file number; the least recently used are dropped. Thread-safe, also after a fork.

    Args:
        snapshot, roots, storage: as in BlockStore.
    """

    def __init__(self, snapshot: Snapshot, roots: Mapping[str, str], storage: Storage) -> None:
        self._snapshot = snapshot
        self._roots = roots
        self._storage = storage
        self._opened = LRUCache[OpenedReader](MAX_OPEN_FILES)
        self._same: dict[
            int, int
        ] = {}  # by file, a version newer than the build's whose content was compared
        self._heaviest = OPEN_BYTES // MAX_OPEN_FILES
        self._turns = dict[tuple[int, int], threading.Lock]()
        """By process, since after a fork nobody releases those of the parent's threads, and
        file."""

    def get(self, file: int) -> OpenedReader:
        """The reader of file `file` of the index. Raises: MissingFileError, ChangedFileError,
        CorruptFileError."""

        def enter() -> OpenedReader:
            entry = self._snapshot.file(file)
            column = self._snapshot.columns[entry.column]
            path = self._snapshot.path(file, self._roots)
            kind = column.kind
            chunks = self._snapshot.chunks(entry)
            digests = read_digests(self._snapshot.store.folder, kind, entry)
            known = dataclasses.replace(entry.opened, group_digests=digests)

            def open_reader() -> BlockReader:
                reader = kind.open(path, column.column, known, storage=self._storage)
                self._check_version(file, entry, path)
                return reader

            reader = open_again(path, open_reader)
            check = None
            checks_bytes = 0 if digests is None else digests.nbytes + len(digests)
            if (sums := self._find_sums(file, path)) is not None:
                checks_bytes += sums.nbytes
                check = FetchedCheck(kind.files(path), sums, self._storage)
            retry_storage = self._storage if find_scheme(path) else None
            self._make_room(
                _READER_BYTES
                + chunks.nbytes
                + kind.reader_block_bytes * entry.num_blocks
                + checks_bytes
            )
            return OpenedReader(reader, chunks, check, retry_storage)

        def enter_in_turn() -> OpenedReader:
            """Over a network, several threads that need a file do not all request
            what opening it takes."""
            if not find_scheme(self._snapshot.path(file, self._roots)):
                return enter()
            turn = os.getpid(), file
            with self._turns.setdefault(turn, threading.Lock()):
                try:
                    return self._opened.get(file, enter)
                finally:
                    self._turns.pop(turn, None)

        return self._opened.get(file, enter_in_turn)

    def _find_sums(self, file: int, path: str) -> Sums | None:
        """What blocks of an opened file are compared with: nothing on a local disk, unless it has
        changed since the build."""
        return self._checksums.find(file) if find_scheme(path) or file in self._same else None

    @cached_property
    def _checksums(self) -> Checksums:
        return Checksums(self._snapshot)

    def _check_version(self, number: int, file: FileEntry, path: str) -> None:
        """Check that the opened file is the one that was indexed. Raises: ChangedFileError; as
        Storage.read does."""
        paths = self._snapshot.columns[file.column].kind.files(path)
        version = number_of(join_etags([self._storage.stat_opened(each) for each in paths]))
        seen = int(self._snapshot.seen[number])
        if version in (seen, self._same.get(number)):
            return
        check_body(path, file.opened.size, file.body, self._storage)
        if seen:
            warn_moved(
                self._snapshot.folder, path, checks_blocks=self._checksums.find(number) is not None
            )
        self._same[number] = version

    def _make_room(self, size: int) -> None:
        """Keep as many readers as fit if all were as large as the largest so far."""
        if size > self._heaviest:
            self._heaviest = size
            self._opened.resize(max(MIN_OPEN_FILES, OPEN_BYTES // size))
