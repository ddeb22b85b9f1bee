"""A table of fixed-width columns, mapped into memory: opened in constant time, shared by all processes of a node.

What is touched of a mapping counts as memory of the process, with some neighbourhood that the system maps along, and stays until
somebody else needs the memory. So rows of a large table are looked up in portions, and each is let go of when it has been
copied: the pages stay in the system's cache, where the next look finds them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.index.tables import columns_of, read_mapped

MAPPED_BYTES = 64 << 20
"""A table up to this size stays mapped as it is touched."""
_REGION_ROWS = 1 << 13
"""Of 8 bytes: 64 KiB, which Linux maps around a page that is touched."""
_PORTION_REGIONS = 24
"""Of each of nine columns: 14 MiB in each thread that looks up rows."""


class MappedTable:
    """Columns by name. Safe to share between threads."""

    def __init__(self, path: Path, columns: np.dtype[np.void]) -> None:
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        batch = read_mapped(path, pa.py_buffer(self._mapping), columns)
        self._columns = columns_of(batch)
        self._is_large = len(self._mapping) > MAPPED_BYTES
        if self._is_large:
            self._mapping.madvise(mmap.MADV_RANDOM)

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
        """A column's values in `rows` int64 [n]: [n], in memory of their own."""
        column = self._columns[name]
        found = np.empty(len(rows), column.dtype)
        for part in self.portions(rows):
            found[part] = column[rows[part]]
        return found
