"""Ranges of local files past the page cache (O_DIRECT): what is read once leaves other things cached, and is not copied twice.

The system takes reads whose place, size and memory are multiples of ALIGNMENT, so that each range is read with what lies around
it up to there. Small reads, such as those of footers, go through the page cache as ever.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import numpy as np

from megablend.errors import DataError
from megablend.kernels.file_ranges import read_ranges
from megablend.storage.base import Allocate, Bytes, FileStat, Int64s
from megablend.storage.local import LocalStorage, data_error, ends_early, file_stat

ALIGNMENT = 4096
"""Bytes; of logical blocks, which are of 512 or of 4096."""


@dataclass(frozen=True, slots=True)
class DirectStorage(LocalStorage):
    """Local files, of which several ranges at a time are read past the page cache."""

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened. Pages and footers are read through two descriptors, which must be of one file."""
        found = LocalStorage.stat_opened(self, path)
        try:
            with self.direct_pool.borrow(path) as fd:
                direct = file_stat(os.fstat(fd))
        except OSError as error:
            raise _direct_error(path, error) from error
        if direct != found:
            raise data_error(path, OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
        return found

    def read_ranges(self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate) -> tuple[Bytes, Int64s]:
        """Several ranges, each with what lies around it; see Storage.read_ranges.

        Raises: as `read` does; DataError where the file system does not offer this.
        """
        starts = offsets // ALIGNMENT * ALIGNMENT
        lengths = -(-(offsets + sizes) // ALIGNMENT) * ALIGNMENT - starts
        ends = np.cumsum(lengths)
        out = allocate(ALIGNMENT + (int(ends[-1]) if len(ends) else 0))
        begins = ends - lengths + -out.ctypes.data % ALIGNMENT
        needed = offsets + sizes - starts
        try:
            with self.direct_pool.borrow(path) as fd:
                done = 0
                while True:
                    done += read_ranges(fd, starts[done:], lengths[done:], begins[done:], False, out)
                    if done == len(starts):
                        return out, begins + (offsets - starts)
                    begin = int(begins[done])
                    room = out[begin : begin + int(lengths[done])].data
                    got = _read_to_end(fd, int(starts[done]), room)
                    if got < needed[done]:
                        raise ends_early(path, int(offsets[done]), int(sizes[done]), os.fstat(fd).st_size)
                    done += 1
        except OSError as error:
            raise _direct_error(path, error) from error


def _direct_error(path: str, error: OSError) -> DataError:
    if error.errno == errno.EINVAL:
        return DataError(path, "its file system does not read past the page cache (O_DIRECT); set direct_io: false")
    return data_error(path, error)


def _read_to_end(fd: int, offset: int, room: memoryview) -> int:
    """How many bytes came; less than there is room for where the file ends."""
    got = 0
    while got < len(room) and got % ALIGNMENT == 0:
        more = os.preadv(fd, [room[got:]], offset + got)
        if not more:
            break
        got += more
    return got
