"""Reads mirrored files without a lock, while the owner writes and evicts pages."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import MissingFileError
from megablend.mirror.disk.block_map import FIRST_WORD, PRIME, RETIRED, BlockMap, fence
from megablend.mirror.disk.disk_calls import disk_error
from megablend.mirror.disk.folder import FileKey, MirrorFolder, boot_id
from megablend.mirror.disk.pages import (
    ALL_PAGES,
    BLOCK_BYTES,
    NO_PAGES,
    PAGE_BYTES,
    Pages,
    pages_of_file,
    subtract,
)
from megablend.mirror.disk.stored_file import SMALL_BYTES, read_small
from megablend.storage.base import Bytes

_TRIES = 4
"""The maximum number of attempts to read pages: the owner may make holes during each of them."""
_BLOCK_SHIFT = BLOCK_BYTES.bit_length() - 1


class MirroredFile:
    """A reader of the held pages of one file. It is thread-safe, can be used in a forked child, and
    is closed when it is garbage-collected.

    To read, it loads the map's counter of punches, checks that all pages are held, reads them, and
    loads the counter again. The owner removes pages from the map, increments the counter, and only
    then makes holes. So if both values are equal, none of the pages became a hole in the meantime.
    """

    def __init__(self, path: Path, data_fd: int, block_map: BlockMap) -> None:
        self.path = path
        self._fd = data_fd
        self._map = block_map
        self._words = block_map.words
        self._gap = NO_PAGES

    @classmethod
    def open(cls, folder: MirrorFolder, key: FileKey) -> MirroredFile | None:
        """Open a mirrored file. Returns: None if no pages of the file are held. Raises: DataError
        if the copy or the map cannot be opened; MissingFileError if the folder no longer exists."""
        digest = key.digest
        if key.size == 0:
            return _WholeFile(b"")
        if key.size < SMALL_BYTES:
            small = read_small(folder, digest)
            if small is None:
                folder.check()
                return None
            return _WholeFile(small[1])
        path = folder.data_path(digest)
        try:
            map_fd = folder.open_file(folder.map_path(digest), os.O_RDONLY)
            try:
                block_map = BlockMap.read(map_fd, mmap.ACCESS_READ)
            finally:
                os.close(map_fd)
            # After a restart of the machine the owner has to check first which pages are left
            if block_map is None or block_map.key != key or block_map.boot != boot_id():
                return None
            return cls(path, folder.open_file(path, os.O_RDONLY), block_map)
        except MissingFileError:
            folder.check()
            return None

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._fd)

    @property
    def is_current(self) -> bool:
        """Whether this copy of the file is still in use. If the owner has given it up, the file has
        to be opened again, since there may be a new copy at the same path."""
        return self._map.punches != RETIRED

    @property
    def is_complete(self) -> bool:
        """Whether all pages of the file are held at present."""
        # Of a large file, all pages are only looked at when the gap that was found last is filled
        if not self.find_missing(self._gap):
            missing = self.find_missing(pages_of_file(self._map.key.size))
            # A copy of the last row: a slice would keep all missing pages in memory
            self._gap = missing.at(missing.blocks == missing.blocks[-1:])
        return not self._gap

    def find_missing(self, pages: Pages) -> Pages:
        """Return the given pages that are not held at present."""
        return self._map.missing(pages) if self.is_current else pages

    def read_into(self, offsets: Int64s, sizes: Int64s, begins: Int64s, out: Bytes) -> bool:
        """Read ranges of the file into `out`.

        Args:
            offsets, sizes: the ranges in bytes (int64 [n]).
            begins: the offset in `out` at which the bytes of each range are stored (int64 [n]).
            out: receives the bytes of the ranges.

        Returns: whether the bytes were read. If not, since a page is not held or was evicted in the
            meantime, the contents of `out` are not valid.

        Raises: DataError if the disk fails.
        """
        for _ in range(_TRIES):
            punches = self.load_punches()
            fence()
            if not self._are_held(offsets, sizes):
                return False
            fence()
            if not self.fill(offsets, sizes, begins, out):
                return False
            fence()
            if self.load_punches() == punches:
                return punches != RETIRED
        return False

    def load_punches(self) -> int:
        """Return the current value of the map's counter of punches."""
        return self._map.punches

    def fill(self, offsets: Int64s, sizes: Int64s, begins: Int64s, out: Bytes) -> bool:
        """Read ranges like `read_into`, but without checking that they are held. Returns: False if
        a range exceeds the copy. Raises: DataError if the disk fails."""
        try:
            if len(sizes) == 1:
                size = int(sizes[0])
                begin = int(begins[0])
                part = out if size == len(out) else out[begin : begin + size]
                if os.preadv(self._fd, [part.data], int(offsets[0])) == size:
                    return True  # otherwise it stopped early, at 2 GiB or at a signal
            from megablend.kernels.file_ranges import read_ranges

            ahead = len(sizes) > 1
            return read_ranges(self._fd, offsets, sizes, begins, ahead, out) == len(sizes)
        except OSError as error:
            raise disk_error(self.path, error) from error

    def _are_held(self, offsets: Int64s, sizes: Int64s) -> bool:
        """Return whether all pages of the ranges are held. There are usually only a few ranges."""
        words = self._words
        try:
            for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
                stop = offset + size
                word = FIRST_WORD + (offset >> _BLOCK_SHIFT << 1)
                last_word = FIRST_WORD + (stop - 1 >> _BLOCK_SHIFT << 1)
                while word <= last_word:
                    pages = words[word]
                    if (pages ^ words[word + 1]) % PRIME:  # see `mirror.disk.block_map`
                        return False
                    if pages != ALL_PAGES:
                        block_begin = (word - FIRST_WORD) * (BLOCK_BYTES // 2)
                        if not _contains_bytes(pages, offset - block_begin, stop - block_begin):
                            return False
                    word += 2
        except IndexError:  # beyond the end of the file
            return False
        return True


def _contains_bytes(pages: int, begin: int, stop: int) -> bool:
    """Return whether a block's mask contains all pages of the block that overlap a range.

    Args:
        pages: the mask.
        begin, stop: the range, in bytes relative to the start of the block. It may exceed the
            block.
    """
    first_page = max(begin, 0) // PAGE_BYTES
    stop_page = -(-min(stop, BLOCK_BYTES) // PAGE_BYTES)
    needed = (1 << stop_page) - (1 << first_page)
    return stop <= begin or pages & needed == needed


class _WholeFile(MirroredFile):
    """A reader of a file under 64 KiB. All bytes are read when the file is opened."""

    is_current = True
    is_complete = True

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)

    def __del__(self) -> None:
        """Do nothing, since no file is open."""

    def find_missing(self, pages: Pages) -> Pages:
        return subtract(pages, pages_of_file(len(self._data)))

    def read_into(self, offsets: Int64s, sizes: Int64s, begins: Int64s, out: Bytes) -> bool:
        for offset, size, begin in zip(
            offsets.tolist(), sizes.tolist(), begins.tolist(), strict=True
        ):
            if offset + size > len(self._data):
                return False
            out[begin : begin + size] = self._data[offset : offset + size]
        return True
