"""How many rows and tokens each page holds, and which documents end in it: pure functions on arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.formats.base import CARRIES, CLOSES, CONTINUES
from megablend.formats.parquet.page import Pieces
from megablend.formats.parquet.page_index import ColumnIndex, OffsetIndex
from megablend.formats.parquet.schema import Column
from megablend.formats.parquet.thrift import MalformedError
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


def count_full(pages: Pages, levels: Counts, rows: Counts | None) -> None:
    """Count pages of which each level is a token: no nulls, no empty lists. Rows are known where they are given."""
    pages["tokens"] = levels
    pages["rows"] = -1 if rows is None else rows
    pages["inner"] = 0 if rows is None else rows
    pages["scan"] = rows is None


def count_by_page_index(pages: Pages, places: OffsetIndex, counts: ColumnIndex, column: Column) -> bool:
    """Count pages by what the page index says; False where it does not tell the tokens. Raises MalformedError.

    With an OffsetIndex, pages begin with a row (parquet-format, PageIndex.md). Null elements make `scan` true: from the
    counts alone one cannot tell whether they fill whole rows, which then are documents without tokens.
    """
    rows = places.rows
    if column.max_rep == 0 and column.max_def == 0:
        tokens, ends, unsure = rows, rows, np.zeros(len(rows), bool)
    elif column.max_rep == 0 and counts.null_counts is not None:
        tokens = ends = rows - counts.null_counts
        unsure = np.zeros(len(rows), bool)
    elif column.max_rep and counts.levels is not None:
        tokens = counts.levels[:, column.max_def]
        ends = rows - counts.levels[:, : column.slot_def].sum(1)
        unsure = counts.levels[:, column.slot_def : column.max_def].sum(1) > 0
        if counts.row_starts is not None and (counts.row_starts != rows).any():
            raise MalformedError("its histograms of repetition levels and the first rows of its pages disagree")
    else:
        return False
    if (tokens < 0).any() or (ends < 0).any() or (ends > tokens + unsure * rows).any():
        raise MalformedError("a page has more nulls than rows, or fewer tokens than rows with tokens")
    pages["tokens"], pages["rows"], pages["inner"], pages["scan"] = tokens, rows, ends, unsure
    return True


def close_documents(pages: Pages) -> tuple[Counts, npt.NDArray[np.uint8]]:
    """Follow the rows of a chunk over its pages (of which each has rows or tokens, and rows are known).

    Returns: documents with tokens that end in each page, int64 [num_pages]; flags of BLOCK_DTYPE, uint8 [num_pages].
    """
    ends, flags = np.zeros(len(pages), np.int64), np.zeros(len(pages), np.uint8)
    follow_documents(pages, CONTINUES, CLOSES, CARRIES, ends, flags)
    return ends, flags
