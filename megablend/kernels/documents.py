"""Pages as blocks: running counts, and documents followed over the pages of column chunks: in which page each one ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import device, kernel

Int64s = npt.NDArray[np.int64]


@kernel
def sum_chunks(pages: npt.NDArray[np.void], first_page: Int64s, sums: Int64s) -> bool:
    """Sum up the pages of chunks. Returns whether each page has rows or tokens.

    Args:
        pages: [num_pages], records with `rows`, `tokens` and `continues`, as formats.parquet.count has them.
        first_page: int64 [num_chunks + 1].
        sums: int64 [3, num_chunks], filled: rows (-1 where those of a page are not known); tokens; 1 where the first page with
            rows or tokens begins in the middle of a row.
    """
    all_filled = True
    for i in range(len(first_page) - 1):
        rows = tokens = np.int64(0)
        is_known, is_first, continues = True, True, False
        for j in range(first_page[i], first_page[i + 1]):
            page = pages[j]
            if page["rows"] == 0 and page["tokens"] == 0:
                all_filled = False
                continue
            if is_first:
                is_first, continues = False, page["continues"]
            rows += page["rows"]
            tokens += page["tokens"]
            is_known &= page["rows"] >= 0
        sums[0, i], sums[1, i], sums[2, i] = rows if is_known else -1, tokens, continues
    return all_filled


@kernel
def fill_blocks(
    pages: npt.NDArray[np.void],
    first_page: Int64s,
    is_known: bool,
    continues_flag: int,
    closes_flag: int,
    carries_flag: int,
    blocks: npt.NDArray[np.void],
) -> None:
    """Make blocks of pages.

    Args:
        pages: [num_pages], records as formats.parquet.count has them; a chunk's first page begins with a row.
        first_page: int64 [num_chunks + 1], the pages of each chunk.
        is_known: whether the rows of all pages are; otherwise `rows` and `ends` are -1, and no flags are set.
        blocks: BLOCK_DTYPE [num_pages] of formats.base, filled.
    """
    first_token = np.int64(0)
    for chunk in range(len(first_page) - 1):
        for i in range(first_page[chunk], first_page[chunk + 1]):
            page, block = pages[i], blocks[i]
            block["chunk"], block["offset"], block["encoding"] = chunk, page["offset"], page["encoding"]
            block["stored_bytes"], block["decoded_bytes"] = page["stored_bytes"], page["decoded_bytes"]
            block["tokens"], block["first_token"] = page["tokens"], first_token
            block["rows"], block["ends"], block["flags"] = page["rows"] if is_known else -1, -1, 0
            first_token += page["tokens"]
    if is_known:
        _follow_documents(pages, continues_flag, closes_flag, carries_flag, blocks)


@device
def _follow_documents(
    pages: npt.NDArray[np.void],
    continues_flag: int,
    closes_flag: int,
    carries_flag: int,
    blocks: npt.NDArray[np.void],
) -> None:
    """Follow rows from page to page: which documents with tokens end there, and the flags that hold."""
    carried = np.int64(0)  # tokens, in earlier pages, of the row that is open at the page's beginning
    for i in range(len(pages)):
        page = pages[i]
        closes = i + 1 == len(pages) or not pages[i + 1]["continues"]
        flag = closes_flag if closes else 0
        ends = page["inner"]
        open_tokens = carried + page["head"]
        if page["continues"]:
            flag |= continues_flag
            if carried > 0:
                flag |= carries_flag
            if page["rows"] > 0 and open_tokens > 0:
                ends += 1
        last = page["tail"] if page["rows"] > 0 else open_tokens
        if closes and last > 0:
            ends += 1
        carried = np.int64(0) if closes else last
        blocks[i]["ends"], blocks[i]["flags"] = ends, flag
