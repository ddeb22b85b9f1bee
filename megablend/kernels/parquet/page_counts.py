"""Data pages from page indexes: located, and counted if the level counts are enough."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.jit import kernel

NONE = 0
"""Nothing is wrong."""
OTHER_ROWS = 1
"""The number of rows that begin in a page contradicts its levels."""
TOO_FEW_TOKENS = 2
"""A page has more nulls than rows, or fewer tokens than rows with tokens."""

MAX_BYTES = (1 << 32) - 1
"""What a block's sizes can hold."""


@kernel
def count_indexed_pages(
    first_page: Int64s,
    offsets: Int64s,
    sizes: Int64s,
    rows: Int64s,
    nulls: Int64s,
    starts: Int64s,
    levels: Int64s,
    has_starts: npt.NDArray[np.bool_],
    growths: npt.NDArray[np.float64],
    encodings: Int64s,
    max_rep: int,
    slot_def: int,
    documents: bool,
    pages: npt.NDArray[np.void],
) -> tuple[int, int, int]:
    """Count pages by the rows that begin in them.
    Rows do begin with pages if there is an OffsetIndex (parquet-format, PageIndex.md).

    Null elements make `scan` true: from the counts alone one cannot tell whether they fill
    whole rows, which then are documents without tokens. If documents are not needed, the
    rows of such a chunk are -1.

    Args:
        first_page: int64 [n + 1], the pages of each chunk.
        offsets, sizes, rows: int64 [num_pages], as `kernels.parquet.page_index` reads them.
        nulls: int64 [num_pages]: what makes the tokens of a flat column.
        starts: int64 [num_pages], levels of repetition level 0.
        levels: int64 [max_def + 1, num_pages], levels by definition level: what makes the tokens of
            lists.
        has_starts: bool [n], which chunks have `starts`.
        growths: float64 [n], decoded bytes for a stored one: the index has no decoded sizes.
        encodings: int64 [n].
        slot_def: the definition level from which on a level stands for an element.
        pages: PAGE_DTYPE [num_pages] of formats.parquet.count, filled.

    Returns: the first chunk that is wrong, what is wrong with it, and 0; if none is n, NONE and
        the pages with `scan`.
    """
    max_def = len(levels) - 1
    num_unsure = 0
    for i in range(len(has_starts)):
        is_sure = True
        for j in range(first_page[i], first_page[i + 1]):
            page = pages[j]
            tokens = ends = most = rows[j]
            unsure = np.int64(0)
            if max_rep:
                tokens = most = levels[max_def, j]
                for level in range(slot_def):
                    ends -= levels[level, j]
                for level in range(slot_def, max_def):
                    unsure += levels[level, j]
                if unsure:
                    most += rows[j]
                    is_sure = False
                    num_unsure += 1
                if has_starts[i] and starts[j] != rows[j]:
                    return i, OTHER_ROWS, 0
            elif max_def:
                tokens = ends = rows[j] - nulls[j]
            if tokens < 0 or ends < 0 or ends > most:
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
            page["scan"] = unsure > 0
        if not is_sure and not documents:
            for j in range(first_page[i], first_page[i + 1]):
                pages[j]["rows"] = -1
    return len(has_starts), NONE, num_unsure
