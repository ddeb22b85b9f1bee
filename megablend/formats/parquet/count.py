"""How many rows and tokens each page holds, and which documents end in it: pure functions on arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.formats.base import CARRIES, CLOSES, CONTINUES
from megablend.formats.parquet.checks import refuse_pages
from megablend.formats.parquet.page import Pieces
from megablend.formats.parquet.page_index import ColumnIndexes, OffsetIndexes
from megablend.formats.parquet.schema import Column
from megablend.kernels.documents import follow_documents

PAGE_DTYPE = np.dtype(
    [
        ("offset", "<i8"),
        ("stored_bytes", "<i8"),  # header included
        ("decoded_bytes", "<i8"),
        ("encoding", "<i1"),
        ("tokens", "<i8"),
        ("rows", "<i8"),  # rows that begin in the page; -1 where not known
        ("continues", "?"),  # the page begins in the middle of a row
        ("head", "<i8"),  # tokens of that row in this page
        ("inner", "<i8"),  # rows with tokens that begin in the page and surely end in it
        ("tail", "<i8"),  # tokens of the last row that begins in the page, where it may go on in the next
        ("scan", "?"),  # the counts of rows are not sure without the page's levels
    ]
)
"""A data page, located and counted."""

Pages = npt.NDArray[np.void]
Counts = npt.NDArray[np.int64]


def count_pieces(page: np.void, pieces: Pieces) -> None:
    """Write what a page's own levels say into its record (of PAGE_DTYPE)."""
    lengths = np.diff(pieces.offsets)
    begun = lengths[int(pieces.continues) :]
    page["tokens"], page["rows"], page["continues"] = pieces.num_tokens, pieces.num_rows, pieces.continues
    page["head"] = lengths[0] if pieces.continues else 0
    page["inner"] = np.count_nonzero(begun[:-1])
    page["tail"] = begun[-1] if len(begun) else 0
    page["scan"] = False


def count_levels(pages: Pages, levels: npt.NDArray[np.void]) -> None:
    """Write what the levels of many pages say (LEVELS_DTYPE [num_pages]) into their records."""
    for name in ("tokens", "continues", "head", "inner", "tail"):
        pages[name] = levels[name]
    pages["rows"] = levels["pieces"] - levels["continues"]
    pages["scan"] = False


def count_full(pages: Pages, levels: Counts, rows: Counts) -> None:
    """Count pages of which each level is a token: no nulls, no empty lists. Rows are -1 where they are not known."""
    pages["tokens"], pages["rows"] = levels, rows
    pages["inner"] = np.maximum(rows, 0)
    pages["scan"] = rows < 0


def count_by_page_index(pages: Pages, places: OffsetIndexes, counts: ColumnIndexes, column: Column) -> None:
    """Count pages of chunks of which `tells_tokens` by what their page indices say. Raises MalformedError.

    With an OffsetIndex, pages begin with a row (parquet-format, PageIndex.md). Null elements make `scan` true: from the
    counts alone one cannot tell whether they fill whole rows, which then are documents without tokens.
    """
    rows, first_page = places.rows, places.first_page
    tokens = ends = rows
    most_ends = rows
    if column.max_rep:
        tokens, ends = counts.levels[column.max_def], rows - counts.levels[: column.slot_def].sum(0)
        unsure = counts.levels[column.slot_def : column.max_def].sum(0) > 0
        pages["scan"] = unsure
        most_ends = tokens + unsure * rows
        disagree = counts.starts != rows
        disagree &= np.repeat(counts.has_starts, np.diff(first_page))
        message = "its histograms of repetition levels and the first rows of its pages disagree"
        refuse_pages(disagree, first_page, lambda _: message)
    elif column.max_def:
        tokens = ends = rows - counts.nulls
    refuse_pages(
        (tokens < 0) | (ends < 0) | (ends > most_ends),
        first_page,
        lambda _: "a page has more nulls than rows, or fewer tokens than rows with tokens",
    )
    pages["tokens"], pages["rows"], pages["inner"] = tokens, rows, ends


def tells_tokens(counts: ColumnIndexes, column: Column) -> npt.NDArray[np.bool_]:
    """Of which chunks the page index tells the tokens of each page, bool [num_chunks]."""
    if column.max_rep:
        return counts.has_levels
    return counts.has_nulls | (column.max_def == 0)


def close_documents(pages: Pages) -> tuple[Counts, npt.NDArray[np.uint8]]:
    """Follow the rows of chunks over their pages (of which each has rows or tokens, and rows are known).

    Chunks may follow each other: the first page of each begins with a row.

    Returns: documents with tokens that end in each page, int64 [num_pages]; flags of BLOCK_DTYPE, uint8 [num_pages].
    """
    ends, flags = np.zeros(len(pages), np.int64), np.zeros(len(pages), np.uint8)
    follow_documents(pages, CONTINUES, CLOSES, CARRIES, ends, flags)
    return ends, flags
