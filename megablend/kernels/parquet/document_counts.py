"""Convert pages to blocks: find the page in which each document of a column chunk ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.jit import device, kernel


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
    """Convert pages to blocks; rows that continue are followed from page to page.

    Args:
        pages: PAGE_DTYPE [num_pages] of formats.parquet.indexing.count, each with rows or tokens; a
            chunk's first page begins with a row.
        first_page: int64 [num_chunks + 1], number of each chunk's first page.
        continues_flag, closes_flag, carries_flag: STARTS_MID_DOCUMENT, ENDS_AT_DOCUMENT_END and
            HAS_EARLIER_TOKENS of formats.base.
        first_tokens: int64 [num_chunks + 1], filled with the number of tokens before each chunk,
            followed by the number of all tokens.
        blocks: BLOCK_DTYPE [num_pages] of formats.base, filled. If the rows of one page are
            unknown, `rows` and `ends` of all blocks are -1, and no flags are set.
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
    """Count the documents with tokens that end in a page. Returns their number, and the number of
    tokens that the page's last row has so far.

    Args:
        carried: number of tokens that the row which the page continues has in earlier pages.
        closes: whether the page's last row ends in it.
    """
    continued_tokens = carried + page["head"]
    has_rows = page["rows"] > 0
    last_tokens = page["tail"] if has_rows else continued_tokens
    continued_ends = page["continues"] and has_rows and continued_tokens > 0
    last_ends = closes and last_tokens > 0
    return page["inner"] + continued_ends + last_ends, last_tokens
