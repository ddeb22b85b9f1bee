"""Checks of many chunks or pages at once, which report the first wrong one; and sums over the pages
of chunks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megablend.arrays import Bools, Int64s, running_totals
from megablend.formats.parquet.metadata.thrift import MalformedError


def refuse(wrong: Bools, problem: Callable[[int], str]) -> None:
    """Raise MalformedError for the first wrong chunk, if there is one.

    Args:
        wrong: bool [num_chunks].
        problem: the message for chunk number i.
    """
    if wrong.any():
        chunk = int(np.argmax(wrong))
        raise MalformedError(problem(chunk), chunk)


def refuse_pages(wrong: Bools, first_page: Int64s, problem: Callable[[int], str]) -> None:
    """Raise MalformedError for the chunk of the first wrong page, if there is one.

    Args:
        wrong: bool [num_pages].
        first_page: int64 [num_chunks + 1], number of each chunk's first page.
        problem: the message for page number i.
    """
    if wrong.any():
        page = int(np.argmax(wrong))
        raise MalformedError(problem(page), chunk_of(page, first_page))


def chunk_of(page: int, first_page: Int64s) -> int:
    """Return the number of the chunk that a page belongs to."""
    return int(np.searchsorted(first_page, page, "right")) - 1


def sum_by_chunk(values: npt.NDArray[np.generic], first_page: Int64s) -> Int64s:
    """Return the sums of values [num_pages] over the pages of each chunk: int64 [num_chunks]."""
    ends = running_totals(values)
    sums: Int64s = ends[first_page[1:]] - ends[first_page[:-1]]
    return sums
