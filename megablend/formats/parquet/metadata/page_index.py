"""Parse the page indexes of many chunks: the positions of pages (OffsetIndex), and their counts of
levels (ColumnIndex).

Source: parquet-format, PageIndex.md and parquet.thrift (OffsetIndex, ColumnIndex).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megablend.arrays import Bools, Int64s, running_totals
from megablend.formats.buffers import empty_from_arrow_pool
from megablend.formats.parquet.metadata.thrift import MalformedError, read_struct
from megablend.kernels.parquet.page_index import (
    BAD_COUNT,
    BAD_OFFSET,
    BAD_ROW,
    BAD_SIZE,
    INCOMPLETE,
    MIN_LOCATION_BYTES,
    NO_PAGES,
    NONE,
    OVERLAP,
    TOO_LARGE,
    UNREADABLE,
    page_counts,
    page_locations,
)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OffsetIndexes:
    """Positions of the data pages of chunks; dictionary pages are not included."""

    first_page: Int64s
    """Number of each chunk's first page: int64 [num_chunks + 1]."""
    offsets: Int64s
    """Offset of each page in the file: int64 [num_pages]."""
    sizes: Int64s
    """Size of each page in bytes, header included: int64 [num_pages]."""
    rows: Int64s
    """Number of rows that begin in each page: int64 [num_pages]; -1 for the pages of a chunk if the
    index contradicts the chunk's number of rows."""

    def of(self, chosen: Bools) -> OffsetIndexes:
        """Return the positions of the pages of some chunks only. chosen: bool [num_chunks]."""
        if chosen.all():
            return self
        counts = np.diff(self.first_page)
        pages = np.repeat(chosen, counts)
        return OffsetIndexes(
            running_totals(counts[chosen]), self.offsets[pages], self.sizes[pages], self.rows[pages]
        )


@dataclass(frozen=True, slots=True)
class ColumnIndexes:
    """Counts of nulls and of levels in the data pages of chunks, if the writer stored them."""

    has_nulls: Bools
    """Whether `nulls` of the chunk's pages are known: bool [num_chunks]."""
    has_levels: Bools
    """Whether `levels` of the chunk's pages are known: bool [num_chunks]."""
    nulls: Int64s
    """Number of nulls in each page: int64 [num_pages]."""
    levels: Int64s
    """Number of levels in each page by definition level: int64 [max_def + 1, num_pages]."""

    def of(self, chosen: Bools, first_page: Int64s) -> ColumnIndexes:
        """Return the counts of the pages of some chunks only. chosen: bool [num_chunks].
        first_page: as in OffsetIndexes, of all chunks."""
        if chosen.all():
            return self
        pages = np.repeat(chosen, np.diff(first_page))
        return ColumnIndexes(
            self.has_nulls[chosen],
            self.has_levels[chosen],
            self.nulls[pages],
            self.levels[:, pages],
        )


def parse_offset_indexes(
    data: Bytes, begins: Int64s, ends: Int64s, *, starts: Int64s, limit: int, num_rows: Int64s
) -> OffsetIndexes:
    """Parse OffsetIndexes; check that pages are in order, within their chunk, and do not overlap.

    Args:
        data: uint8, the encoded OffsetIndexes.
        begins, ends: int64 [num_chunks], where the OffsetIndex of each chunk is in `data`.
        starts: int64 [num_chunks], byte of the file at which each chunk begins.
        limit: byte of the file before which all pages end.
        num_rows: int64 [num_chunks], number of rows of each chunk.

    Raises: MalformedError.
    """
    first_page = np.empty(len(begins) + 1, np.int64)
    offsets, sizes, rows = empty_from_arrow_pool(
        (3, int((ends - begins).sum()) // MIN_LOCATION_BYTES), np.int64
    )
    chunk, problem, page = page_locations(
        data, begins, ends, starts, limit, num_rows, first_page, offsets, sizes, rows
    )
    if problem == UNREADABLE:
        _complain(data[begins[chunk] : ends[chunk]], "OffsetIndex", chunk)
    if problem != NONE:
        numbers = {BAD_OFFSET: offsets, BAD_SIZE: sizes, TOO_LARGE: sizes, BAD_ROW: rows}
        number = numbers[problem][page] if problem in numbers else 0
        raise MalformedError(
            {
                NO_PAGES: f"it lists no pages for {num_rows[chunk]} rows",
                BAD_OFFSET: f"the offset of a page is {number}, expected 0 to 2**48",
                BAD_SIZE: f"compressed_page_size is {number}, expected 0 to 2**48",
                BAD_ROW: f"first_row_index is {number}, expected 0 to 2**48",
                TOO_LARGE: f"a page of {number} bytes is larger than the limit of 2 GiB",
                OVERLAP: f"its pages overlap or are outside their column chunk, bytes {starts[chunk]} to {limit}",
            }[problem],
            chunk,
        )
    num_pages = first_page[-1]
    return OffsetIndexes(first_page, offsets[:num_pages], sizes[:num_pages], rows[:num_pages])


def parse_column_indexes(
    data: Bytes, begins: Int64s, ends: Int64s, *, first_page: Int64s, max_def: int
) -> ColumnIndexes:
    """Parse and check ColumnIndexes. A chunk without one has 0 bytes.

    Args:
        data: uint8, the encoded ColumnIndexes.
        begins, ends: int64 [num_chunks], where the ColumnIndex of each chunk is in `data`.
        first_page: int64 [num_chunks + 1], number of each chunk's first page.

    Raises: MalformedError.
    """
    num_pages = int(first_page[-1])
    nulls = empty_from_arrow_pool((1, num_pages), np.int64)
    levels = empty_from_arrow_pool((max_def + 1, num_pages), np.int64)
    # For each chunk: its number of counts of nulls, and of definition levels
    num_counts = np.empty((len(begins), 2), np.int64)
    chunk, problem, kind = page_counts(data, begins, ends, first_page, nulls, levels, num_counts)
    if problem == UNREADABLE:
        _complain(data[begins[chunk] : ends[chunk]], "ColumnIndex", chunk)
    if problem != NONE:
        width = (1, max_def + 1)[kind]
        pages = first_page[chunk + 1] - first_page[chunk]
        raise MalformedError(
            {
                INCOMPLETE: f"it has {num_counts[chunk, kind]} counts, expected {width} for each of {pages} pages",
                BAD_COUNT: "one of its counts is negative or implausibly large",
            }[problem],
            chunk,
        )
    has_nulls, has_levels = num_counts.T > 0
    return ColumnIndexes(has_nulls, has_levels, nulls[0], levels)


def _complain(data: Bytes, name: str, item: int) -> NoReturn:
    """Raise the MalformedError for a struct in chunk `item` that the kernel could not parse."""
    try:
        read_struct(data.tobytes())
    except MalformedError as error:
        raise MalformedError(str(error), item) from error
    raise MalformedError(f"it is not a valid {name}", item)
