"""The page index: where pages lie (OffsetIndex), and how many levels of each kind they hold (ColumnIndex).

Source: parquet-format, PageIndex.md and parquet.thrift (OffsetIndex, ColumnIndex).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.thrift import MAX_COUNT, MalformedError, read_struct
from megablend.kernels.page_index import MIN_LOCATION_BYTES, page_counts, page_locations

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
    offsets, sizes, rows = np.zeros((3, len(data) // MIN_LOCATION_BYTES), np.int64)
    found = page_locations(np.frombuffer(data, np.uint8), offsets, sizes, rows)
    if found < 0:
        _complain(data, "OffsetIndex")
    offsets, sizes, rows = offsets[:found].copy(), sizes[:found].copy(), np.append(rows[:found], num_rows)
    _check_counts("offset of a page", offsets)
    _check_counts("compressed_page_size", sizes)
    _check_counts("first_row_index", rows)
    ends = offsets + sizes
    if (sizes >= 1 << 31).any():
        raise MalformedError(f"a page of {sizes.max()} bytes is larger than a page can be (2 GiB)")
    if found and (offsets[0] < start or ends[-1] > end or (ends[:-1] > offsets[1:]).any()):
        raise MalformedError(f"its pages overlap or lie outside of their column chunk, bytes {start} to {end}")
    if (found and rows[0] != 0) or (np.diff(rows) < 0).any():
        raise MalformedError(f"its first rows do not ascend from 0 to the {num_rows} rows of the row group")
    return OffsetIndex(offsets, sizes, rows)


def parse_column_index(data: bytes, *, num_pages: int, max_def: int, max_rep: int) -> ColumnIndex:
    """Parse a ColumnIndex; counts that the writer left out are None. Raises MalformedError."""
    nulls = np.zeros((num_pages, 1), np.int64)
    starts = np.zeros((num_pages, max_rep + 1), np.int64)
    levels = np.zeros((num_pages, max_def + 1), np.int64)
    counts = nulls.reshape(-1), starts.reshape(-1), levels.reshape(-1)
    status, num_nulls, num_starts, num_levels = page_counts(np.frombuffer(data, np.uint8), *counts)
    if status < 0:
        _complain(data, "ColumnIndex")
    has_levels, has_starts, has_nulls = (
        _is_complete(found, counts)
        for found, counts in ((num_levels, levels), (num_starts, starts), (num_nulls, nulls))
    )
    if has_levels and has_starts and (levels.sum(1) != starts.sum(1)).any():
        raise MalformedError("its histograms of definition and repetition levels have different sums")
    return ColumnIndex(
        null_counts=nulls[:, 0] if has_nulls else None,
        levels=levels if has_levels else None,
        row_starts=starts[:, 0] if has_starts else None,
    )


def _complain(data: bytes, name: str) -> NoReturn:
    """Say what is wrong with a struct that the kernel could not read. Raises MalformedError."""
    read_struct(data)
    raise MalformedError(f"it is not what the format says of an {name}")


def _check_counts(name: str, values: Int64s) -> None:
    wrong = values[(values < 0) | (values > MAX_COUNT)]
    if len(wrong):
        raise MalformedError(f"{name} is {wrong[0]}, expected 0 to 2**48")


def _is_complete(found: int, counts: Int64s) -> bool:
    """Whether the writer gave counts of this kind. Raises MalformedError where they are not as many as there have to be."""
    if not found:
        return False
    num_pages, width = counts.shape
    if found != counts.size:
        raise MalformedError(f"it has {found} counts, expected {width} for each of {num_pages} pages")
    if (counts < 0).any() or (counts > 1 << 40).any():
        raise MalformedError("one of its counts is negative or absurdly large")
    return True
