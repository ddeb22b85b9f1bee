"""Locate data pages by page indexes, and count their rows and tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.jit import device, kernel

NONE = 0
"""Nothing is wrong."""
TOO_FEW_TOKENS = 1
"""A page has more nulls than rows, or fewer tokens than rows with tokens."""

MAX_BYTES = (1 << 32) - 1
"""Maximum size of a block: the index has 32 bits for it."""


@kernel
def count_indexed_pages(
    first_page: Int64s,
    offsets: Int64s,
    sizes: Int64s,
    rows: Int64s,
    nulls: Int64s,
    levels: Int64s,
    growths: npt.NDArray[np.float64],
    encodings: Int64s,
    max_rep: int,
    slot_def: int,
    documents: bool,
    pages: npt.NDArray[np.void],
) -> tuple[int, int, int]:
    """Locate and count pages. In a file with an OffsetIndex, each page begins with a row
    (parquet-format, PageIndex.md).

    If a page has null elements, `scan` is set, since the counts do not determine whether the null
    elements fill whole rows: such rows are documents without tokens. If documents are not needed,
    the rows of all pages in the chunk of such a page are -1.

    Args:
        first_page: int64 [n + 1], number of each chunk's first page.
        offsets, sizes, rows: int64 [num_pages], from `page_index.page_locations`.
        nulls: int64 [num_pages], number of nulls; used for flat columns.
        levels: int64 [max_def + 1, num_pages], number of levels by definition level; used for
            lists.
        growths: float64 [n], ratio of decoded to stored bytes of each chunk, by which the decoded
            sizes of pages are estimated.
        encodings: int64 [n], encoding of the pages of each chunk.
        slot_def: lowest definition level of a level that stands for an element.
        documents: whether rows must be exact.
        pages: PAGE_DTYPE [num_pages] of formats.parquet.indexing.count, filled.

    Returns: the number of the first wrong chunk, its problem, and 0; if no chunk is wrong, n, NONE
        and the number of pages with `scan`.
    """
    num_uncertain = 0
    for i in range(len(encodings)):
        num_with_nulls = 0
        for j in range(first_page[i], first_page[i + 1]):
            tokens, ends, null_elements = _count_page(j, rows, nulls, levels, max_rep, slot_def)
            if tokens < 0:
                return i, TOO_FEW_TOKENS, 0
            num_with_nulls += null_elements != 0
            page = pages[j]
            page["offset"] = offsets[j]
            page["stored_bytes"] = sizes[j]
            page["encoding"] = encodings[i]
            page["decoded_bytes"] = min(np.ceil(sizes[j] * growths[i]), MAX_BYTES)
            page["tokens"] = tokens
            page["rows"] = rows[j]
            page["inner"] = ends
            page["continues"] = False
            page["head"] = 0
            page["tail"] = 0
            page["scan"] = null_elements > 0
        num_uncertain += num_with_nulls
        if num_with_nulls and not documents:
            for j in range(first_page[i], first_page[i + 1]):
                pages[j]["rows"] = -1
    return len(encodings), NONE, num_uncertain


@device
def _count_page(
    j: int, rows: Int64s, nulls: Int64s, levels: Int64s, max_rep: int, slot_def: int
) -> tuple[int, int, int]:
    """Count page j: return the number of its tokens, of its rows with tokens, and of its null
    elements. The number of tokens is negative if the counts in the page index contradict each
    other. Arguments: see `count_indexed_pages`."""
    max_def = len(levels) - 1
    tokens = rows[j]
    if not max_rep:
        if max_def:
            tokens -= nulls[j]
        return tokens if tokens <= rows[j] else np.int64(-1), tokens, np.int64(0)
    tokens = levels[max_def, j]
    ends = rows[j]
    for level in range(slot_def):
        ends -= levels[level, j]
    null_elements = np.int64(0)
    for level in range(slot_def, max_def):
        null_elements += levels[level, j]
    # Rows whose elements are all null have no tokens
    max_ends = tokens + rows[j] if null_elements else tokens
    return tokens if 0 <= ends <= max_ends else np.int64(-1), ends, null_elements
