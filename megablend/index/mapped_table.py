"""A table of fixed-width columns, mapped into memory: opened in constant time, shared by all processes of a node.

What is touched of a mapping counts as memory of the process, with the neighbourhood that the system maps along, 64 KiB to 2 MiB a
touch, and stays until somebody else needs the memory. So rows of a large table are read from the file instead: they come from the
system's cache all the same, and what is beside them stays there. Kernels that walk through a column do so in portions, each of
which is let go of.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.errors import REPAIR_REMEDY, CacheError
from megablend.fs.atomic_write import reading
from megablend.index.tables import columns_of, read_mapped
from megablend.kernels.file_ranges import read_ranges

Int64s = npt.NDArray[np.int64]
MAPPED_BYTES = 64 << 20
"""A table up to this size is mapped as a whole."""
_AHEAD_ROWS = 256
"""So many rows are asked of the disk all at once: few have been looked up before."""
_REGION_ROWS, _PORTION_REGIONS = 1 << 14, 8
"""Rows that may lie within what one touch maps, of 4 bytes; touches in a portion."""


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # of what was only read, nothing is lost
        os.close(fd)


class MappedTable:
    """Columns by name. Safe to share between threads, and after a fork."""

    def __init__(self, path: Path, columns: np.dtype[np.void]) -> None:
        with reading(path):
            self._path, self._fd = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, _close, self._fd)
            if os.fstat(self._fd).st_size == 0:
                raise CacheError(f"{path}: damaged table: it is empty; {REPAIR_REMEDY}")
            self._mapping = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        data = pa.py_buffer(self._mapping)
        self._columns = columns_of(read_mapped(path, data, columns))
        self._is_large = len(self._mapping) > MAPPED_BYTES
        self._begins = {
            name: column.__array_interface__["data"][0] - data.address for name, column in self._columns.items()
        }
        """Where each column begins in the file."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """A column, read-only; what is touched of it stays in memory."""
        return self._columns[name]

    def portions(self, rows: npt.NDArray[np.int64]) -> Iterator[slice]:
        """Parts of `rows` int64 [n], numbers of rows in any order, one after the other; what is touched for each is let go of."""
        if not self._is_large:
            yield slice(0, len(rows))
            return
        regions = np.cumsum(np.diff(rows // _REGION_ROWS, prepend=-1) != 0)
        num_portions = -(-int(regions[-1]) // _PORTION_REGIONS) if len(rows) else 0
        bounds = np.searchsorted(regions, np.arange(num_portions + 1) * _PORTION_REGIONS, side="right")
        for start, stop in pairwise(bounds.tolist()):
            yield slice(start, stop)
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def take(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """A column's values in `rows` int64 [n], numbers in range, any order: [n], in memory of their own.

        Raises: CacheError where the file cannot be read.
        """
        column = self._columns[name]
        if not self._is_large or not len(rows):
            return column[rows]
        found = np.empty(len(rows), column.dtype)
        size, firsts = column.itemsize, np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)  # of runs of neighbours
        starts, begins = rows[firsts], firsts * size
        sizes = np.diff(begins, append=len(rows) * size)
        ahead = len(starts) >= _AHEAD_ROWS
        self._read(self._begins[name] + starts * size, sizes, begins, ahead, found.view(np.uint8))
        return found

    def _read(self, offsets: Int64s, sizes: Int64s, begins: Int64s, ahead: bool, out: npt.NDArray[np.uint8]) -> None:
        """Ranges of the file; one that stops early (where a signal came) is read again. Raises: CacheError."""
        done = 0
        while True:
            done += read_ranges(self._fd, offsets[done:], sizes[done:], begins[done:], ahead, out)
            if done == len(offsets):
                return
            offset, size, begin = int(offsets[done]), int(sizes[done]), int(begins[done])
            with reading(self._path):
                part = os.pread(self._fd, size, offset)
            if len(part) < size:
                raise CacheError(f"{self._path}: damaged table: it ends before byte {offset + size}; {REPAIR_REMEDY}")
            out[begin : begin + size] = np.frombuffer(part, np.uint8)
            done += 1
