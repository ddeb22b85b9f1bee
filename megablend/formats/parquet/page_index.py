"""The page index: where pages lie (OffsetIndex), and how many levels of each kind they hold (ColumnIndex).

Source: parquet-format, PageIndex.md and parquet.thrift (OffsetIndex, ColumnIndex).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.thrift import MalformedError, read_struct

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OffsetIndex:
    """Places of the data pages of a chunk; a dictionary page is not among them."""

    offsets: Int64s
    """int64 [num_pages], bytes in the file."""
    sizes: Int64s
    """int64 [num_pages], bytes, headers included."""
    first_rows: Int64s
    """int64 [num_pages + 1]: rows of the row group before each page, and all of them."""

    @property
    def rows(self) -> Int64s:
        """int64 [num_pages]."""
        return np.diff(self.first_rows)


@dataclass(frozen=True, slots=True)
class ColumnIndex:
    """Counts of the data pages of a chunk, as far as the writer tells them."""

    null_counts: Int64s | None
    """int64 [num_pages]."""
    levels: Int64s | None
    """int64 [num_pages, max_def + 1]: levels by definition level."""
    row_starts: Int64s | None
    """int64 [num_pages]: levels of repetition level 0."""


def parse_offset_index(data: bytes, *, start: int, end: int, num_rows: int) -> OffsetIndex:
    """Parse and check an OffsetIndex: pages in order, apart, within bytes [start, end). Raises MalformedError."""
    index, _ = read_struct(data)
    places = index.structs(1, "page_locations")
    offsets = np.array([p.count(1, "offset of a page") for p in places], np.int64)
    sizes = np.array([p.count(2, "compressed_page_size") for p in places], np.int64)
    rows = np.array([*(p.count(3, "first_row_index") for p in places), num_rows], np.int64)
    ends = offsets + sizes
    if (sizes >= 1 << 31).any():
        raise MalformedError(f"a page of {sizes.max()} bytes is larger than a page can be (2 GiB)")
    if len(places) and (offsets[0] < start or ends[-1] > end or (ends[:-1] > offsets[1:]).any()):
        raise MalformedError(f"its pages overlap or lie outside of their column chunk, bytes {start} to {end}")
    if (len(places) and rows[0] != 0) or (np.diff(rows) < 0).any():
        raise MalformedError(f"its first rows do not ascend from 0 to the {num_rows} rows of the row group")
    return OffsetIndex(offsets, sizes, rows)


def parse_column_index(data: bytes, *, num_pages: int, max_def: int, max_rep: int) -> ColumnIndex:
    """Parse a ColumnIndex; counts that the writer left out are None. Raises MalformedError."""
    index, _ = read_struct(data)
    levels = _counts(index.integers(7, "definition_level_histograms") if 7 in index else [], num_pages, max_def + 1)
    starts = _counts(index.integers(6, "repetition_level_histograms") if 6 in index else [], num_pages, max_rep + 1)
    nulls = _counts(index.integers(5, "null_counts") if 5 in index else [], num_pages, 1)
    if levels is not None and starts is not None and (levels.sum(1) != starts.sum(1)).any():
        raise MalformedError("its histograms of definition and repetition levels have different sums")
    return ColumnIndex(
        null_counts=None if nulls is None else nulls[:, 0],
        levels=levels,
        row_starts=None if starts is None else starts[:, 0],
    )


def _counts(values: list[int], num_pages: int, width: int) -> Int64s | None:
    if not values:
        return None
    if len(values) != num_pages * width:
        raise MalformedError(f"it has {len(values)} counts, expected {width} for each of {num_pages} pages")
    counts = np.array(values, np.int64)
    if (counts < 0).any() or (counts > 1 << 40).any():
        raise MalformedError("one of its counts is negative or absurdly large")
    return counts.reshape(num_pages, width)
