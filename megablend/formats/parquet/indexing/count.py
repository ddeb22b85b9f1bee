"""Count the rows and tokens of pages, and the documents that end in them: pure functions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.formats.base import (
    BLOCK_DTYPE,
    ENDS_AT_DOCUMENT_END,
    HAS_EARLIER_TOKENS,
    STARTS_MID_DOCUMENT,
    Array,
)
from megablend.formats.buffers import empty_from_arrow_pool
from megablend.formats.parquet.metadata.checks import refuse_pages, sum_by_chunk
from megablend.formats.parquet.metadata.column_chunk import Chunks
from megablend.formats.parquet.metadata.page_index import ColumnIndexes, OffsetIndexes
from megablend.formats.parquet.metadata.schema import Column
from megablend.kernels.parquet.document_counts import fill_blocks

PAGE_DTYPE = np.dtype(
    [
        ("offset", "<i8"),
        ("stored_bytes", "<i8"),  # header included
        ("decoded_bytes", "<i8"),
        ("encoding", "<i1"),
        ("tokens", "<i8"),
        ("rows", "<i8"),  # rows that begin in the page; -1 if unknown
        ("continues", "?"),  # the page begins in the middle of a row
        ("head", "<i8"),  # tokens of that row in this page
        ("inner", "<i8"),  # rows with tokens that begin in the page and certainly end in it
        # tokens of the last row that begins in the page, if it may continue in the next
        ("tail", "<i8"),
        ("scan", "?"),  # the row counts are uncertain without the page's levels
    ]
)
"""A data page: its place in the file, and its counts of tokens and rows."""

_MAX_BYTES = (1 << 32) - 1
"""Maximum size of a block: the index has 32 bits for it."""

Pages = npt.NDArray[np.void]
Counts = npt.NDArray[np.int64]


def count_levels(pages: Pages, levels: npt.NDArray[np.void]) -> None:
    """Fill the counts of pages, PAGE_DTYPE [num_pages], from their decoded levels, LEVELS_DTYPE
    [num_pages]."""
    for name in ("tokens", "continues", "head", "inner", "tail"):
        pages[name] = levels[name]
    pages["rows"] = levels["pieces"] - levels["continues"]
    pages["scan"] = False


def count_full(pages: Pages, levels: Counts, rows: Counts) -> None:
    """Fill the counts of pages in which every level is a token: without nulls and empty lists.

    Args:
        levels: int64 [num_pages], number of levels.
        rows: int64 [num_pages], rows that begin in each page; -1 if unknown.
    """
    pages["tokens"] = levels
    pages["rows"] = rows
    pages["inner"] = np.maximum(rows, 0)
    pages["scan"] = rows < 0


def count_from_page_index(
    offset_indexes: OffsetIndexes,
    column_indexes: ColumnIndexes,
    column: Column,
    chunks: Chunks,
    encodings: Counts,
    *,
    documents: bool,
) -> tuple[Pages, int]:
    """Locate and count the pages of chunks by their page indexes. `has_token_counts` must be true
    for each of these chunks.

    Args:
        encodings: int64 [num_chunks], encoding of the pages of each chunk.
        documents: whether rows must be exact; otherwise they are -1 if they are uncertain.

    Returns: PAGE_DTYPE [num_pages]; and the number of pages with `scan`, whose rows are uncertain.
    Raises: MalformedError.
    """
    rows = offset_indexes.rows
    null_elements = np.zeros(len(rows), np.int64)
    if column.max_rep:
        tokens = column_indexes.levels[column.max_def]
        ends = rows - column_indexes.levels[: column.slot_def].sum(axis=0)
        null_elements = column_indexes.levels[column.slot_def : column.max_def].sum(axis=0)
        # Rows whose elements are all null have no tokens
        max_ends = np.where(null_elements > 0, tokens + rows, tokens)
    else:
        tokens = rows - column_indexes.nulls if column.max_def else rows
        ends = max_ends = tokens
    refuse_pages(
        (ends < 0) | (ends > max_ends),
        offset_indexes.first_page,
        lambda _: "a page has more nulls than rows, or fewer tokens than rows with tokens",
    )
    growths = chunks["decoded_bytes"] / np.maximum(1, chunks["stored_bytes"])
    num_pages = np.diff(offset_indexes.first_page)
    decoded_bytes = np.ceil(offset_indexes.sizes * np.repeat(growths, num_pages))
    is_uncertain = null_elements > 0
    pages = empty_from_arrow_pool(len(rows), PAGE_DTYPE)
    pages["offset"] = offset_indexes.offsets
    pages["stored_bytes"] = offset_indexes.sizes
    pages["decoded_bytes"] = np.minimum(decoded_bytes, _MAX_BYTES)
    pages["encoding"] = np.repeat(encodings, num_pages)
    pages["tokens"] = tokens
    pages["rows"] = rows
    pages["inner"] = ends
    pages["scan"] = is_uncertain
    for name in ("continues", "head", "tail"):
        pages[name] = 0
    num_uncertain = int(np.count_nonzero(is_uncertain))
    if num_uncertain and not documents:
        has_uncertain = sum_by_chunk(is_uncertain, offset_indexes.first_page) > 0
        pages["rows"][np.repeat(has_uncertain, num_pages)] = -1
    return pages, num_uncertain


_COUNTED_AT_ONCE = 1 << 14
"""Arrow C++ 19 to 25 writes wrong level histograms if the only levels are 0 and 1, and more than
this number of levels are written at once: the first ones are counted several times, others never
(apache/arrow#50778). The number of nulls, which is not taken from the histogram, is correct."""


def has_histogram(chunks: Chunks, column: Column) -> npt.NDArray[np.bool_]:
    """Return whether the metadata of chunks has a consistent histogram of definition levels: bool
    [num_chunks]."""
    fits: npt.NDArray[np.bool_] = chunks["num_levels"] == column.max_def + 1
    fits &= chunks["all_levels"] == chunks["num_values"]
    if column.max_def == 1:
        nulls = chunks["num_values"] - chunks["top_level"]
        fits &= (chunks["num_values"] <= _COUNTED_AT_ONCE) | (chunks["null_count"] == nulls)
    return fits


def find_miscounted(
    offset_indexes: OffsetIndexes, column_indexes: ColumnIndexes, chunks: Chunks, column: Column
) -> npt.NDArray[np.bool_]:
    """Return whether the page indexes of chunks are wrong: bool [num_chunks]. A page index is wrong
    if the rows of its pages are unknown, or if its level histograms disagree with num_values in the
    metadata. Histograms that may be wrong nevertheless must also agree with the numbers of
    nulls."""
    first_page = offset_indexes.first_page
    levels = column_indexes.levels.sum(axis=0)
    wrong: npt.NDArray[np.bool_] = sum_by_chunk(levels, first_page) != chunks["num_values"]
    # The tokens of a flat column follow from its nulls alone
    if column.max_def == 1 and column.max_rep:
        is_known = np.repeat(column_indexes.has_nulls, np.diff(first_page))
        is_right = is_known & (column_indexes.levels[0] == column_indexes.nulls)
        wrong |= sum_by_chunk((levels > _COUNTED_AT_ONCE) & ~is_right, first_page) > 0
    has_wrong_rows: npt.NDArray[np.bool_] = offset_indexes.rows[first_page[:-1]] < 0
    return (column_indexes.has_levels & wrong) | has_wrong_rows


def has_token_counts(column_indexes: ColumnIndexes, column: Column) -> npt.NDArray[np.bool_]:
    """Return whether the page index of each chunk determines the number of tokens of each page:
    bool [num_chunks]."""
    if column.max_rep:
        return column_indexes.has_levels
    return column_indexes.has_nulls | (column.max_def == 0)


def blocks_of(pages: Pages, first_page: Counts) -> tuple[Array, Counts]:
    """Convert pages to blocks. Each page must have rows or tokens. If the number of rows of one
    page is unknown, the numbers of rows of all blocks are unknown.

    Args:
        first_page: int64 [num_chunks + 1], number of each chunk's first page, which begins with a
            row.

    Returns: BLOCK_DTYPE [num_pages]; and the number of tokens before each chunk, followed by the
        number of all tokens, int64 [num_chunks + 1].
    """
    blocks = np.empty(len(pages), BLOCK_DTYPE)
    first_tokens = np.empty(len(first_page), np.int64)
    fill_blocks(
        pages,
        first_page,
        STARTS_MID_DOCUMENT,
        ENDS_AT_DOCUMENT_END,
        HAS_EARLIER_TOKENS,
        first_tokens,
        blocks,
    )
    return blocks, first_tokens
