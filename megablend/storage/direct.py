"""Reading ranges of local files without the page cache (O_DIRECT): this evicts nothing from the
cache, and saves a copy.

The system requires that offset, size and memory are multiples of ALIGNMENT, so each range is
extended to such boundaries. Small reads, such as those of footers, use the page cache as usual.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Container
from dataclasses import replace

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import DataError
from megablend.kernels.file_ranges import read_ranges
from megablend.storage.base import Allocate, Bytes, FileStat, ReadLimits
from megablend.storage.local import (
    MAX_READS,
    LocalStorage,
    data_error,
    ends_early,
    file_stat,
    replaced_error,
)

ALIGNMENT = 4096
"""Bytes; logical blocks have 512 or 4096."""


class DirectStorage(LocalStorage):
    """Local files; reads of several ranges do not use the page cache."""

    __slots__ = ()

    def limits(self, path: str) -> ReadLimits:
        """See Storage.limits."""
        return replace(LocalStorage.limits(self, path), max_reads=MAX_READS, separate_bytes=None)

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened. Pages and footers are read through two descriptors, which must
        refer to the same file."""
        found = LocalStorage.stat_opened(self, path)
        try:
            with self.direct_pool.borrow(path, self.opened) as fd:
                direct = file_stat(os.fstat(fd))
        except OSError as error:
            raise _direct_error(path, error, self.opened) from error
        if direct != found:
            raise replaced_error(path)
        return found

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """Read several ranges, each extended to aligned boundaries; see Storage.read_ranges.

        Raises: as `read` does; DataError if the file system does not support O_DIRECT.
        """
        starts = offsets // ALIGNMENT * ALIGNMENT
        lengths = -(-(offsets + sizes) // ALIGNMENT) * ALIGNMENT - starts
        ends = np.cumsum(lengths)
        out = allocate(ALIGNMENT + (int(ends[-1]) if len(ends) else 0))
        begins = ends - lengths + -out.ctypes.data % ALIGNMENT
        needed = offsets + sizes - starts
        try:
            with self.direct_pool.borrow(path, self.opened) as fd:
                done = 0
                while True:
                    done += read_ranges(
                        fd, starts[done:], lengths[done:], begins[done:], False, out
                    )
                    if done == len(starts):
                        return out, begins + (offsets - starts)
                    begin = int(begins[done])
                    room = out[begin : begin + int(lengths[done])].data
                    got = _read_to_end(fd, int(starts[done]), room)
                    if got < needed[done]:
                        raise ends_early(
                            path, int(offsets[done]), int(sizes[done]), os.fstat(fd).st_size
                        )
                    done += 1
        except OSError as error:
            raise _direct_error(path, error, self.opened) from error


def _direct_error(path: str, error: OSError, opened: Container[str]) -> DataError:
    if error.errno == errno.EINVAL:
        return DataError(path, "its file system does not support O_DIRECT; set direct_io: false")
    return data_error(path, error, opened)


def _read_to_end(fd: int, offset: int, room: memoryview) -> int:
    """Fill `room`, or read up to the end of the file. Returns: the number of bytes that were
    read."""
    got = 0
    while got < len(room) and got % ALIGNMENT == 0:
        more = os.preadv(fd, [room[got:]], offset + got)
        if not more:
            break
        got += more
    return got
