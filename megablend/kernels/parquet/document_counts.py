"""Converting pages to blocks: running counts,
and the page in which each document of a column chunk ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.jit import device, kernel


@kernel
def sum_chunks(pages: npt.NDArray[np.void], first_page: Int64s, sums: Int64s) -> bool:
    """Sum up the pages of chunks. Returns whether each page has rows or tokens.

    Args:
        pages: [num_pages], records with `rows`, `tokens` and `continues`, as formats.parquet.count
            has them.
        first_page: int64 [num_chunks + 1].
        sums: int64 [3, num_chunks], filled: rows (-1 if those of a page are unknown); tokens; 1
            if the first page with rows or tokens begins in the middle of a row.
    """
    all_filled = True
    for i in range(len(first_page) - 1):
        rows = tokens = np.int64(0)
        is_known = True
        is_first = True
        continues = False
        for j in range(first_page[i], first_page[i + 1]):
            page = pages[j]
            if page["rows"] == 0 and page["tokens"] == 0:
                all_filled = False
                continue
            if is_first:
                is_first = False
                continues = page["continues"]
            rows += page["rows"]
            tokens += page["tokens"]
            is_known &= page["rows"] >= 0
        sums[0, i] = rows if is_known else -1
        sums[1, i] = tokens
        sums[2, i] = continues
    return all_filled


@kernel
def fill_blocks(
    pages: npt.NDArray[np.void],
    first_page: Int64s,
    continues_flag: int,
    closes_flag: int,
    carries_flag: int,
    first_tokens: Int64s,
    blocks: npt.NDArray[np.void],
) -> None:
    """Make blocks of pages, of which each has rows or tokens,
    and follow the rows from page to page.

    Args:
        pages: [num_pages], records as formats.parquet.count has them; a chunk's first page begins
            with a row.
        first_page: int64 [num_chunks + 1], the pages of each chunk.
        first_tokens: int64 [num_chunks + 1], filled: tokens before each chunk, and all.
        blocks: BLOCK_DTYPE [num_pages] of formats.base, filled. If the rows of a page are unknown,
            `rows` and `ends` of all are -1, and no flags are set.
    """
    is_known = True
    for i in range(len(pages)):
        is_known &= pages[i]["rows"] >= 0
    first_token = np.int64(0)
    for chunk in range(len(first_page) - 1):
        first_tokens[chunk] = first_token
        carried = np.int64(0)
        begin = first_page[chunk]
        end = first_page[chunk + 1]
        for i in range(begin, end):
            page = pages[i]
            block = blocks[i]
            block["chunk"] = chunk
            block["offset"] = page["offset"]
            block["encoding"] = page["encoding"]
            block["stored_bytes"] = page["stored_bytes"]
            block["decoded_bytes"] = page["decoded_bytes"]
            block["tokens"] = page["tokens"]
            block["first_token"] = first_token
            first_token += page["tokens"]
            block["rows"] = -1
            block["ends"] = -1
            block["flags"] = 0
            if is_known:
                closes = i + 1 == end or not pages[i + 1]["continues"]
                block["rows"] = page["rows"]
                block["ends"], last = _documents(page, carried, closes)
                if page["continues"]:
                    block["flags"] = continues_flag | (carries_flag if carried > 0 else 0)
                if closes:
                    block["flags"] |= closes_flag
                carried = np.int64(0) if closes else last
    first_tokens[-1] = first_token


@device
def _documents(page: np.void, carried: int, closes: bool) -> tuple[int, int]:
    """Documents with tokens that end in a page; tokens, so far, of the row that is open at its end.

    Args:
        carried: tokens, in earlier pages, of the row that is open at the page's beginning.
        closes: the page's last row ends in it.
    """
    open_tokens = carried + page["head"]
    has_rows = page["rows"] > 0
    last = page["tail"] if has_rows else open_tokens
    ends = (
        page["inner"] + (page["continues"] and has_rows and open_tokens > 0) + (closes and last > 0)
    )
    return ends, last
