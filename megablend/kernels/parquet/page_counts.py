"""Locating data pages by page indexes, and counting their rows and tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.jit import kernel

NONE = 0
"""Nothing is wrong."""
TOO_FEW_TOKENS = 1
"""A page has more nulls than rows, or fewer tokens than rows with tokens."""

MAX_BYTES = (1 << 32) - 1
"""Largest size of a block: the index has 32 bits for it."""


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
    the rows of the pages of such a chunk are -1.

    Args:
        first_page: int64 [n + 1], number of each chunk's first page.
        offsets, sizes, rows: int64 [num_pages], from `page_index.page_locations`.
        nulls: int64 [num_pages], number of nulls; used for flat columns.
        levels: int64 [max_def + 1, num_pages], number of levels by definition level; used for
            lists.
        growths: float64 [n], ratio of decoded to stored bytes of each chunk, by which the decoded
            sizes of pages are estimated.
        encodings: int64 [n], encoding of each chunk's pages.
        slot_def: lowest definition level of a level that stands for an element.
        documents: whether rows must be exact.
        pages: PAGE_DTYPE [num_pages] of formats.parquet.indexing.count, filled.

    Returns: the number of the first wrong chunk, its problem, and 0; without one n, NONE, and the
        number of pages with `scan`.
    """
    max_def = len(levels) - 1
    num_uncertain = 0
    for i in range(len(encodings)):
        is_certain = True
        for j in range(first_page[i], first_page[i + 1]):
            page = pages[j]
            # Rows with tokens, and their largest possible number
            tokens = ends = max_ends = rows[j]
            null_elements = np.int64(0)
            if max_rep:
                tokens = max_ends = levels[max_def, j]
                for level in range(slot_def):
                    ends -= levels[level, j]
                for level in range(slot_def, max_def):
                    null_elements += levels[level, j]
                if null_elements:
                    max_ends += rows[j]
                    is_certain = False
                    num_uncertain += 1
            elif max_def:
                tokens = ends = rows[j] - nulls[j]
            if tokens < 0 or ends < 0 or ends > max_ends:
                return i, TOO_FEW_TOKENS, 0
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
        if not is_certain and not documents:
            for j in range(first_page[i], first_page[i + 1]):
                pages[j]["rows"] = -1
    return len(encodings), NONE, num_uncertain
