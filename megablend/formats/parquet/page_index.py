"""The page indices of many chunks: where pages lie (OffsetIndex), and how many levels of each kind they hold (ColumnIndex).

Source: parquet-format, PageIndex.md and parquet.thrift (OffsetIndex, ColumnIndex).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.checks import chunk_of, refuse, refuse_pages, starts_of
from megablend.formats.parquet.thrift import MAX_COUNT, MalformedError, read_struct
from megablend.kernels.page_index import MIN_LOCATION_BYTES, page_counts, page_locations

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

MAX_PAGE_COUNT = 1 << 40
"""No honest page has more levels of a kind."""


@dataclass(frozen=True, slots=True)
class OffsetIndexes:
    """Places of the data pages of chunks; dictionary pages are not among them."""

    first_page: Int64s
    """int64 [num_chunks + 1], the pages of each chunk."""
    offsets: Int64s
    """int64 [num_pages], bytes in the file."""
    sizes: Int64s
    """int64 [num_pages], bytes, headers included."""
    rows: Int64s
    """int64 [num_pages]."""

    def of(self, chosen: Bools) -> OffsetIndexes:
        """Those of chosen chunks, bool [num_chunks]."""
        if chosen.all():
            return self
        counts = np.diff(self.first_page)
        pages = np.repeat(chosen, counts)
        return OffsetIndexes(starts_of(counts[chosen]), self.offsets[pages], self.sizes[pages], self.rows[pages])


@dataclass(frozen=True, slots=True)
class ColumnIndexes:
    """Counts of the data pages of chunks, as far as their writers tell them."""

    has_nulls: Bools
    """bool [num_chunks]."""
    has_levels: Bools
    has_starts: Bools
    nulls: Int64s
    """int64 [num_pages]."""
    levels: Int64s
    """int64 [max_def + 1, num_pages]: levels by definition level."""
    totals: Int64s
    """int64 [num_pages]: levels."""
    starts: Int64s
    """int64 [num_pages]: levels of repetition level 0."""

    def of(self, chosen: Bools, first_page: Int64s) -> ColumnIndexes:
        """Those of chosen chunks, bool [num_chunks]; of all, `first_page` has the pages."""
        if chosen.all():
            return self
        pages = np.repeat(chosen, np.diff(first_page))
        has_nulls, has_levels, has_starts = (has[chosen] for has in (self.has_nulls, self.has_levels, self.has_starts))
        return ColumnIndexes(
            has_nulls,
            has_levels,
            has_starts,
            self.nulls[pages],
            self.levels[:, pages],
            self.totals[pages],
            self.starts[pages],
        )


def parse_offset_indexes(
    data: Bytes, begins: Int64s, ends: Int64s, *, starts: Int64s, limit: int, num_rows: Int64s
) -> OffsetIndexes:
    """Parse and check OffsetIndexes: pages in order, apart, within their chunk.

    Args:
        data: uint8, OffsetIndexes.
        begins, ends: int64 [num_chunks], where each one lies there.
        starts: int64 [num_chunks], the byte of the file before which a chunk's pages do not begin.
        limit: the byte beyond which none goes.
        num_rows: int64 [num_chunks].

    Raises: MalformedError.
    """
    counts = np.zeros(len(begins), np.int64)
    offsets, sizes, first_rows = np.empty((3, int((ends - begins).sum()) // MIN_LOCATION_BYTES), np.int64)
    done = page_locations(data, begins, ends, counts, offsets, sizes, first_rows)
    if done < len(begins):
        _complain(data[begins[done] : ends[done]], "OffsetIndex", done)
    refuse(counts == 0, lambda i: f"it lists no pages for {num_rows[i]} rows")
    first_page = starts_of(counts)
    first, last, num_pages = first_page[:-1], first_page[1:] - 1, first_page[-1]
    offsets, sizes, first_rows = offsets[:num_pages], sizes[:num_pages], first_rows[:num_pages]
    _check_counts("offset of a page", offsets, first_page)
    _check_counts("compressed_page_size", sizes, first_page)
    _check_counts("first_row_index", first_rows, first_page)
    refuse_pages(
        sizes >= 1 << 31, first_page, lambda i: f"a page of {sizes[i]} bytes is larger than a page can be (2 GiB)"
    )
    free = np.empty_like(offsets)  # bytes from each page's beginning to the next one's, and rows likewise
    np.subtract(offsets[1:], offsets[:-1], out=free[:-1])
    free[last] = limit - offsets[last]
    wrong = free < sizes
    wrong[first] |= offsets[first] < starts

    def overlap(page: int) -> str:
        chunk = chunk_of(page, first_page)
        return f"its pages overlap or lie outside of their column chunk, bytes {starts[chunk]} to {limit}"

    refuse_pages(wrong, first_page, overlap)
    rows = free
    np.subtract(first_rows[1:], first_rows[:-1], out=rows[:-1])
    rows[last] = num_rows - first_rows[last]
    wrong = rows < 0
    wrong[first] |= first_rows[first] != 0

    def disorder(page: int) -> str:
        chunk = chunk_of(page, first_page)
        return f"its first rows do not ascend from 0 to the {num_rows[chunk]} rows of the row group"

    refuse_pages(wrong, first_page, disorder)
    return OffsetIndexes(first_page, offsets, sizes, rows)


def parse_column_indexes(
    data: Bytes, begins: Int64s, ends: Int64s, *, first_page: Int64s, max_def: int, max_rep: int
) -> ColumnIndexes:
    """Parse ColumnIndexes. A chunk may have none: one of no bytes.

    Args:
        data: uint8, ColumnIndexes.
        begins, ends: int64 [num_chunks], where each one lies there.
        first_page: int64 [num_chunks + 1], the pages of each chunk.

    Raises: MalformedError.
    """
    num_pages = int(first_page[-1])
    nulls = np.zeros((1, num_pages), np.int64)
    starts = np.zeros((max_rep + 1, num_pages), np.int64)
    levels = np.zeros((max_def + 1, num_pages), np.int64)
    found = np.zeros((len(begins), 3), np.int64)
    done = page_counts(data, begins, ends, first_page, nulls, starts, levels, found)
    if done < len(begins):
        _complain(data[begins[done] : ends[done]], "ColumnIndex", done)
    num_nulls, num_starts, num_levels = found.T
    has_levels = _are_complete(num_levels, levels, first_page)
    has_starts = _are_complete(num_starts, starts, first_page)
    has_nulls = _are_complete(num_nulls, nulls, first_page)
    totals = levels.sum(0)
    differ = totals != starts.sum(0)
    differ &= np.repeat(has_levels & has_starts, np.diff(first_page))
    message = "its histograms of definition and repetition levels have different sums"
    refuse_pages(differ, first_page, lambda _: message)
    return ColumnIndexes(has_nulls, has_levels, has_starts, nulls[0], levels, totals, starts[0])


def _complain(data: Bytes, name: str, item: int) -> NoReturn:
    """Say what is wrong with a struct that the kernel could not read. Raises MalformedError."""
    try:
        read_struct(data.tobytes())
    except MalformedError as error:
        raise MalformedError(str(error), item) from error
    raise MalformedError(f"it is not what the format says of an {name}", item)


def _check_counts(name: str, values: Int64s, first_page: Int64s) -> None:
    wrong = values.view(np.uint64) > MAX_COUNT  # negative ones, too
    refuse_pages(wrong, first_page, lambda i: f"{name} is {values[i]}, expected 0 to 2**48")


def _are_complete(found: Int64s, counts: Int64s, first_page: Int64s) -> Bools:
    """Which chunks have counts of this kind, [height, num_pages]: all that there have to be, or none. Raises MalformedError."""
    num_pages, height = np.diff(first_page), len(counts)
    refuse(
        (found > 0) & (found != num_pages * height),
        lambda i: f"it has {found[i]} counts, expected {height} for each of {num_pages[i]} pages",
    )
    for row in counts:
        wrong = row.view(np.uint64) > MAX_PAGE_COUNT  # negative ones, too
        refuse_pages(wrong, first_page, lambda _: "one of its counts is negative or absurdly large")
    has: Bools = found > 0
    return has
