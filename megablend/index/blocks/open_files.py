"""Open the files of an index when they are first needed, and check that each is still the file that
was indexed."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from megablend.errors import ChangedFileError, CorruptFileError, UnsupportedFileError
from megablend.formats.base import Array, BlockReader
from megablend.formats.fetch import Check
from megablend.index.read.block_checksums import Sums, find_wrong, open_checksums, place_in_sums
from megablend.index.read.idx_digests import read_digests
from megablend.index.read.joined_snapshot import JoinedSnapshot
from megablend.index.read.snapshot import Snapshot
from megablend.index.tables.file_table import FileEntry
from megablend.index.tables.file_versions import check_body, join_etags, numbers_of, warn_moved
from megablend.lazy import cached_property
from megablend.lru import LRUCache
from megablend.storage.base import Bytes, Storage, allocate_bytes
from megablend.storage.hints import distrust
from megablend.storage.location import find_scheme
from megablend.storage.ranges import FetchedRanges
from megablend.system.log import LOG

MAX_READS = 8
"""Number of attempts to read a range before it is considered damaged."""
MAX_OPENS = 20
"""Number of attempts to open a file before its description is considered different from the index.
It is larger than MAX_READS, since each attempt makes several reads."""
MIN_OPEN_FILES = 1 << 10
"""Number of readers that are kept regardless of their memory, since opening a file again would read
its footer again. (The number of open descriptors is limited by the storage.)"""
MAX_OPEN_FILES = 1 << 14
"""Maximum number of readers that are kept."""
OPEN_BYTES = 32 << 20
"""Maximum memory of the readers in bytes; MIN_OPEN_FILES readers are kept even if they take
more."""
_READER_BYTES = 2 << 10
"""Memory of a reader in bytes, without its tables."""


class Checksums:
    """The checksums of the blocks of an index, which may be a JoinedSnapshot. Raises: CacheError if
    they are damaged."""

    def __init__(self, snapshot: Snapshot) -> None:
        parts = snapshot.snapshots if isinstance(snapshot, JoinedSnapshot) else (snapshot,)
        self._parts = [(part.num_files, open_checksums(part)) for part in parts]

    def find(self, number: int) -> Sums | None:
        """Return the checksums of a file, given by its number, or None if the index has none for
        it."""
        for num_files, checksums in self._parts:
            if number < num_files:
                return None if checksums is None else checksums.of_file(number)
            number -= num_files
        return None


class FetchedCheck:
    """A function that compares fetched ranges of an indexed file with their checksums, and reads a
    range again if it differs.

    Args:
        paths: the data file and the other files that belong to it; see `Format.files`.
        sums: the checksums of the files' ranges.
        storage: the storage that reads ranges again.
    """

    def __init__(self, paths: Sequence[str], sums: Sums, storage: Storage) -> None:
        self._paths = list(paths)
        self._sums = sums
        self._storage = storage

    def __call__(self, fetched: FetchedRanges) -> None:
        """Check fetched ranges. Read ranges that differ from their checksums again, and replace
        them. Raises: CorruptFileError if a range differs each time it is read; the errors of
        Storage.read."""
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
            wrong = [
                still_wrong
                for offset, data in wrong
                for still_wrong in self._find_wrong(position, offset, data)
            ]
        if wrong:
            offset, data = wrong[0]
            raise CorruptFileError(
                path,
                f"{len(data)} bytes differ from their checksum in the index, {MAX_READS} times in "
                "a row; restore the file, or, if the checksums are those of a wrong file, remove "
                "the cache's folder `checksums` and run `megablend build CONFIG --checksums`",
                offset=offset,
            )

    def _find_wrong(self, position: int, offset: int, data: Bytes) -> list[tuple[int, Bytes]]:
        """Return the ranges within `data` that differ from their checksums, each as an offset and a
        view of the bytes."""
        ranges = find_wrong(self._sums, place_in_sums(position, offset), data)
        return [(offset + start, data[start : start + size]) for start, size in ranges]

    def _read_again(self, path: str, parts: Sequence[tuple[int, Bytes]]) -> None:
        """Read ranges again, and overwrite their bytes in place."""
        offsets = np.array([offset for offset, _ in parts], np.int64)
        sizes = np.array([len(part) for _, part in parts], np.int64)
        distrust(self._storage, path, offsets, sizes)
        data, begins = self._storage.read_ranges(path, offsets, sizes, allocate_bytes)
        for (_, part), begin in zip(parts, begins.tolist(), strict=True):
            part[:] = data[begin : begin + len(part)]


class OpenedReader(NamedTuple):
    """An opened file and its reader."""

    reader: BlockReader
    chunks: Array
    """The file's chunk table: CHUNK_DTYPE [num_chunks]."""
    check: Check | None
    """Compares fetched ranges with checksums; None if there is nothing to compare."""
    retry_storage: Storage | None
    """The storage that fetches damaged bytes once more, see FileRead; None for files on a local
    disk."""


class OpenFiles:
    """A cache of the readers of an index's files. When it is full, it drops the least recently used
    reader. It can be shared between threads and used after a fork.

    Args:
        snapshot, roots, storage: as in BlockStore.
    """

    def __init__(self, snapshot: Snapshot, roots: Mapping[str, str], storage: Storage) -> None:
        self._snapshot = snapshot
        self._roots = roots
        self._storage = storage
        self._opened = LRUCache[OpenedReader](MAX_OPEN_FILES)
        self._same_content: dict[int, int] = {}
        """File number -> version of the file, for files whose version has changed since the build
        but whose content has not."""
        self._max_reader_bytes = OPEN_BYTES // MAX_OPEN_FILES
        self._opening = dict[tuple[int, int], threading.Lock]()
        """Locks by process and file. The process is part of the key because locks that the parent's
        threads hold stay locked after a fork."""

    def get(self, file: int) -> OpenedReader:
        """Return the reader of a file, given by its number in the index. Raises: MissingFileError,
        ChangedFileError, CorruptFileError."""
        opened = self._opened.find(file)
        if opened is not None:
            return opened
        # Only one of the threads that need the file opens it, and the others wait for it
        key = os.getpid(), file
        with self._opening.setdefault(key, threading.Lock()):
            try:
                return self._opened.get(file, partial(self._open, file))
            finally:
                self._opening.pop(key, None)

    def _open(self, file: int) -> OpenedReader:
        """Open a file. Over a network, try up to MAX_OPENS times until its description is the one
        that was indexed. Raises: the error of the last attempt."""
        entry = self._snapshot.files.entry(file)
        column = self._snapshot.columns[entry.column]
        path = self._snapshot.path(file, self._roots)
        source_format = column.kind
        chunks = self._snapshot.chunks(entry)
        digests = read_digests(self._snapshot.store.folder, source_format, entry)
        opened = dataclasses.replace(entry.opened, group_digests=digests)
        retry_storage = self._storage if find_scheme(path) else None
        num_opens = 1 if retry_storage is None else MAX_OPENS
        for left in reversed(range(num_opens)):
            try:
                reader = source_format.open(path, column.column, opened, storage=self._storage)
                self._check_version(file, entry, path)
                break
            except (ChangedFileError, CorruptFileError, UnsupportedFileError):
                if not left:
                    raise
        size = _READER_BYTES + chunks.nbytes + source_format.reader_block_bytes * entry.num_blocks
        if digests is not None:
            size += digests.nbytes + len(digests)
        check = None
        # Blocks of a file on a local disk need no check, unless it was moved, copied or touched
        # since the build
        needs_check = retry_storage is not None or file in self._same_content
        sums = self._checksums.find(file) if needs_check else None
        if sums is not None:
            size += sums.nbytes
            check = FetchedCheck(source_format.files(path), sums, self._storage)
        # Limit the number of readers to what fits if each is as large as the largest so far
        if size > self._max_reader_bytes:
            self._max_reader_bytes = size
            self._opened.resize(max(MIN_OPEN_FILES, OPEN_BYTES // size))
        return OpenedReader(reader, chunks, check, retry_storage)

    @cached_property
    def _checksums(self) -> Checksums:
        return Checksums(self._snapshot)

    def _check_version(self, number: int, file: FileEntry, path: str) -> None:
        """Check that the opened file is the version that was indexed, or has the same content.
        Raises: ChangedFileError; the errors of Storage.read."""
        paths = self._snapshot.columns[file.column].kind.files(path)
        versions = numbers_of(join_etags(map(self._storage.stat_opened, paths)))
        seen = int(self._snapshot.seen[number])
        if seen in versions or self._same_content.get(number) in versions:
            return
        check_body(path, file.opened.size, file.body, self._storage)
        if seen:
            warn_moved(
                self._snapshot.folder, path, checks_blocks=self._checksums.find(number) is not None
            )
        self._same_content[number] = versions[0]
