"""A memory-mapped table of fixed-width columns, opened in constant time and shared by all processes
of a node.

When a page of a mapping is accessed, the system also maps adjacent pages (64 KiB to 2 MiB per
access). All of them count as memory of the process until the memory is needed elsewhere. Therefore
single rows of a large table are read from the file instead: they still come from the page cache,
but without adjacent pages. Kernels that walk through a column do so in portions, and the memory of
each portion is released.
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

from megablend.errors import DamagedCacheError
from megablend.index.tables.tables import map_file, parse_batch, schema_of
from megablend.kernels.file_ranges import fill_ranges
from megablend.system.atomic_write import reading
from megablend.system.safe_open import open_regular


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the file was only read: nothing is lost
        os.close(fd)


class MappedTable:
    """A memory-mapped table whose columns are accessed by name. It can be shared between threads,
    and used after a fork."""

    mapped_bytes = 64 << 20
    """Tables of up to this size in bytes are always read through the mapping."""
    ahead_rows = 256
    """If there are at least this many separate reads, the system is asked to read ahead, since few
    of so many ranges are likely to be in the page cache."""
    region_rows = 1 << 14
    """Number of rows of 4 bytes in a region of 64 KiB. The system may map a whole region when one
    of its rows is accessed."""
    portion_regions = 8
    """Number of regions that are accessed before the memory of a portion is released."""

    def __init__(self, path: Path | str, columns: np.dtype[np.void]) -> None:
        self._path = path
        self._dtypes = columns
        with reading(path), open_regular(path) as file:
            self._content = map_file(file)
            self._is_large = len(self._content) > self.mapped_bytes
            if self._is_large:
                self._fd = os.dup(file.fileno())
                weakref.finalize(self, _close, self._fd)
        self._batch = parse_batch(path, pa.py_buffer(self._content), schema_of(columns))
        self.num_rows: int = self._batch.num_rows
        self._columns: dict[str, npt.NDArray[Any]] = {}
        """The columns that were accessed, by name."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return a column, read-only. The parts that are accessed stay in memory."""
        column = self._columns.get(name)
        if column is None:
            values = self._batch.column(name).buffers()[1]
            column = np.frombuffer(values or b"", self._dtypes[name], self.num_rows)
            self._columns[name] = column
        return column

    def find_begin(self, name: str) -> int:
        """Return the offset at which a column begins in the file. The table must have rows."""
        content = np.frombuffer(self._content, np.uint8)
        return int(self[name].ctypes.data - content.ctypes.data)

    def portions(self, rows: npt.NDArray[np.int64]) -> Iterator[slice]:
        """Yield consecutive slices of `rows` (int64 [n], row numbers in any order). In a large
        table, the mapped memory is released after each slice has been used."""
        if not self._is_large:
            yield slice(0, len(rows))
            return
        regions = np.cumsum(np.diff(rows // self.region_rows, prepend=-1) != 0)
        num_portions = -(-int(regions[-1]) // self.portion_regions) if len(rows) else 0
        bounds = np.searchsorted(
            regions, np.arange(num_portions + 1) * self.portion_regions, side="right"
        )
        for start, stop in pairwise(bounds.tolist()):
            yield slice(start, stop)
            if isinstance(self._content, mmap.mmap):
                self._content.madvise(mmap.MADV_DONTNEED)

    def take(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return a column's values in the given rows, as a new array.

        Args:
            rows: int64 [n], valid row numbers in any order.

        Raises: CacheError if the file cannot be read.
        """
        column = self[name]
        if not self._is_large or not len(rows):
            return column[rows]
        values = np.empty(len(rows), column.dtype)
        size = column.itemsize
        # Consecutive rows are read together; `firsts` are the positions in `rows` at which reads
        # begin
        firsts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
        offsets = self.find_begin(name) + rows[firsts] * size
        begins = firsts * size
        sizes = np.diff(begins, append=len(rows) * size)
        out = values.view(np.uint8)
        ahead = len(firsts) >= self.ahead_rows
        # A range is read again if a signal interrupted its read
        for i in fill_ranges(self._fd, offsets, sizes, begins, ahead, out):
            begin = int(begins[i])
            with reading(self._path):
                part = os.pread(self._fd, int(sizes[i]), int(offsets[i]))
            if len(part) < sizes[i]:
                raise DamagedCacheError.of(
                    f"{self._path}: damaged table: it ends before byte {offsets[i] + sizes[i]}"
                )
            out[begin : begin + len(part)] = np.frombuffer(part, np.uint8)
        return values
