"""Reads from elsewhere than a local disk, compared with the index's checksums of blocks, where it has some.

A range that differs is read again: a bit that flipped on the way does not flip again. One that differs each time is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import numpy as np

from megablend.errors import CorruptFileError
from megablend.index.block_checksums import BlockChecksums, Sums, find_folder, find_wrong
from megablend.index.manifest import MANIFEST
from megablend.index.snapshot import Snapshot
from megablend.lazy import cached_property
from megablend.lru import LRUCache
from megablend.storage.base import Allocate, Bytes, Int64s, Storage
from megablend.storage.location import find_scheme
from megablend.storage.wrapper import WrapperStorage

MAX_READS = 4
"""Times that a range is read before it counts as damaged."""
_MAX_FILES = 1 << 12
_LOG = logging.getLogger("megablend")
Result = tuple[Bytes, Int64s]


def check_reads(snapshot: Snapshot, roots: Mapping[str, str], storage: Storage) -> Storage:
    """The storage, with reads compared if the index has checksums and a source is not on a local disk."""
    is_remote = any(find_scheme(roots.get(column.source_name, column.root)) for column in snapshot.columns)
    if not is_remote or isinstance(storage, CheckedReads) or not (find_folder(snapshot) / MANIFEST).is_file():
        return storage
    return CheckedReads(snapshot, roots, storage)


class CheckedReads(WrapperStorage):
    """A storage whose reads of blocks are compared with their checksums. Picklable.

    Raises, from reads: CorruptFileError if a block differs each time it is read.
    """

    def __init__(self, snapshot: Snapshot, roots: Mapping[str, str], inner: Storage) -> None:
        super().__init__(inner)
        self._snapshot, self._roots = snapshot, dict(roots)
        self._sums = LRUCache[Sums](_MAX_FILES)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedReads, (self._snapshot, self._roots, self.inner)

    def read_ranges(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> Result:
        """See Storage.read_ranges."""
        return self.fetch(path, offsets, sizes, allocate).result()

    def fetch(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> Future[Result]:
        """See Storage.fetch."""
        fetched = self.inner.fetch(path, offsets, sizes, allocate)
        if not find_scheme(path) or path not in self._numbers:
            return fetched
        sums = self._sums.get(path, lambda: self._checksums.of_files(self._numbers[path]))
        return _CheckedFetch(self.inner, path, sums, offsets, sizes).start(fetched)

    @cached_property
    def _checksums(self) -> BlockChecksums:
        return BlockChecksums(self._snapshot)

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        """Numbers of the files at each path: one for each column that is indexed of it."""
        found: dict[str, list[int]] = {}
        for number in range(self._snapshot.num_files):
            found.setdefault(self._snapshot.path(number, self._roots), []).append(number)
        return found


class _CheckedFetch:
    """Ranges of a file that are fetched, compared, and fetched again where they differ."""

    def __init__(self, storage: Storage, path: str, sums: Sums, offsets: Int64s, sizes: Int64s) -> None:
        self._storage, self._path, self._sums = storage, path, sums
        self._offsets, self._sizes = offsets.tolist(), sizes.tolist()
        self._reads, self._checked = 0, Future[Result]()
        self._wrong: list[tuple[int, int, int]] = []
        """Offset and size of ranges that differ, and where they are in the result."""

    def start(self, fetched: Future[Result]) -> Future[Result]:
        """The result of a fetch once it has been compared."""
        fetched.add_done_callback(self._check_all)
        return self._checked

    def _check_all(self, fetched: Future[Result]) -> None:
        with suppress(InvalidStateError):  # the caller no longer wants it
            try:
                data, begins = self._result = fetched.result()
                for offset, size, begin in zip(self._offsets, self._sizes, begins.tolist(), strict=True):
                    wrong = find_wrong(self._sums, offset, data[begin : begin + size])
                    self._wrong += [(start, length, begin + start - offset) for start, length in wrong]
                self._continue()
            except BaseException as error:  # also that of a cancelled future
                self._checked.set_exception(error)

    def _continue(self) -> None:
        """Read again what differs, or finish."""
        self._reads += 1
        if not self._wrong:
            self._checked.set_result(self._result)
            return
        offset, size, _ = self._wrong[0]
        if self._reads == MAX_READS:
            raise CorruptFileError(
                self._path,
                f"{size} bytes differ from their checksum in the index, {MAX_READS} times in a row: restore the file; or, if it "
                "was damaged already when the index was built, build the index and the checksums again",
                offset=offset,
            )
        _LOG.info("%s: %d bytes at byte %d differ from their checksum; reading them again", self._path, size, offset)
        offsets, sizes = (np.array([each[i] for each in self._wrong], np.int64) for i in (0, 1))
        again = self._storage.fetch(self._path, offsets, sizes, lambda total: np.empty(total, np.uint8))
        again.add_done_callback(self._replace)

    def _replace(self, fetched: Future[Result]) -> None:
        with suppress(InvalidStateError):
            try:
                data, begins = fetched.result()
                still_wrong = []
                for (offset, size, place), begin in zip(self._wrong, begins.tolist(), strict=True):
                    part = data[begin : begin + size]
                    if find_wrong(self._sums, offset, part):
                        still_wrong.append((offset, size, place))
                    else:
                        self._result[0][place : place + size] = part
                self._wrong = still_wrong
                self._continue()
            except BaseException as error:
                self._checked.set_exception(error)
