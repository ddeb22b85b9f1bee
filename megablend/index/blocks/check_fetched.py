"""Fetched bytes compared with the index's checksums of blocks, where it has some; what differs is
read again.

For files that are not on a local disk, since a bit that flipped in transit does not flip again; and
for local ones that were moved, copied or touched since the build. Done by the threads that fetch
and decode, not by the storage's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np

from megablend.errors import ChangedFileError, CorruptFileError, UnsupportedFileError
from megablend.index.read.block_checksums import Sums, find_wrong, open_checksums, place_in_sums
from megablend.index.read.joined_snapshot import JoinedSnapshot
from megablend.index.read.snapshot import Snapshot
from megablend.storage.base import Bytes, Storage
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
    """The checksums of an index, of several snapshots where it is joined. Raises: CacheError if
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
    """Open a file; again if its description is not what was indexed, and it is not on a local disk.

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
                f"{len(data)} bytes differ from their checksum in the index, {MAX_READS} times in a row: restore the file; or, "
                "if it was wrong when its checksums were made, remove the folder `checksums` of the cache, and `megablend build "
                "CONFIG --checksums` makes them again",
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
        data, begins = self._storage.read_ranges(
            path, offsets, sizes, lambda total: np.empty(total, np.uint8)
        )
        for (_, part), begin in zip(parts, begins.tolist(), strict=True):
            part[:] = data[begin : begin + len(part)]
