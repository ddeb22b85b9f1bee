"""Read ranges of local files without the page cache (O_DIRECT). This evicts nothing from the cache
and saves a copy.

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
from megablend.kernels.file_ranges import fill_ranges
from megablend.storage.base import Allocate, Bytes, FileStat, ReadLimits
from megablend.storage.local import (
    MAX_READS,
    LocalStorage,
    data_error,
    file_stat,
    replaced_error,
)

ALIGNMENT = 4096
"""The number of bytes to which reads are aligned: disks have logical blocks of 512 or 4096
bytes."""


class DirectStorage(LocalStorage):
    """A storage of local files whose `read_ranges` bypasses the page cache."""

    __slots__ = ()

    def limits(self, path: str) -> ReadLimits:
        """See Storage.limits."""
        return replace(LocalStorage.limits(self, path), max_reads=MAX_READS, separate_bytes=None)

    def stat_opened(self, path: str) -> FileStat:
        """See Storage.stat_opened. Pages and footers are read through two descriptors, which must
        refer to the same file."""
        buffered = LocalStorage.stat_opened(self, path)
        try:
            with self.direct_pool.borrow(path, self.opened) as fd:
                direct = file_stat(os.fstat(fd))
        except OSError as error:
            raise _direct_error(path, error, self.opened) from error
        if direct != buffered:
            raise replaced_error(path)
        return buffered

    def read_ranges(
        self, path: str, offsets: Int64s, sizes: Int64s, allocate: Allocate
    ) -> tuple[Bytes, Int64s]:
        """Read several ranges, each extended to aligned boundaries; see Storage.read_ranges.

        Raises: the same errors as `read`; DataError if the file system does not support O_DIRECT.
        """
        starts = offsets // ALIGNMENT * ALIGNMENT
        lengths = -(-(offsets + sizes) // ALIGNMENT) * ALIGNMENT - starts
        needed = offsets + sizes - starts  # the file may end within the rest of a length
        ends = np.cumsum(lengths)
        out = allocate(ALIGNMENT + (int(ends[-1]) if len(ends) else 0))
        first_aligned = -out.ctypes.data % ALIGNMENT
        begins = first_aligned + ends - lengths
        try:
            with self.direct_pool.borrow(path, self.opened) as fd:
                # An extended range may end after the end of the file
                for i in fill_ranges(fd, starts, lengths, begins, False, out):
                    begin = int(begins[i])
                    memory = out[begin : begin + int(lengths[i])].data
                    if _read_to_end(fd, int(starts[i]), memory) < needed[i]:
                        # The file ends early, or its file system returned fewer bytes than it has
                        data = self.read(path, int(offsets[i]), int(sizes[i]))
                        begin += int(offsets[i] - starts[i])
                        out[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        except OSError as error:
            raise _direct_error(path, error, self.opened) from error
        return out, begins + (offsets - starts)


def _direct_error(path: str, error: OSError, opened: Container[str]) -> DataError:
    """Return the error for a file that cannot be read without the page cache."""
    if error.errno == errno.EINVAL:
        return DataError(path, "its file system does not support O_DIRECT; set direct_io: false")
    return data_error(path, error, opened)


def _read_to_end(fd: int, offset: int, memory: memoryview) -> int:
    """Read a file, starting at `offset`, until `memory` is full or the file ends. The end may be at
    an unaligned offset. Returns: the number of bytes that were read."""
    num_bytes = 0
    while num_bytes < len(memory) and num_bytes % ALIGNMENT == 0:
        more_bytes = os.preadv(fd, [memory[num_bytes:]], offset + num_bytes)
        if not more_bytes:
            break
        num_bytes += more_bytes
    return num_bytes
