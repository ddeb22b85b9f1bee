"""Documents over the pages of a column chunk: in which page each one ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import kernel


@kernel
def follow_documents(
    pages: npt.NDArray[np.void],
    continues_flag: int,
    closes_flag: int,
    carries_flag: int,
    ends: npt.NDArray[np.int64],
    flags: npt.NDArray[np.uint8],
) -> None:
    """Follow the rows of a chunk from page to page.

    Args:
        pages: [num_pages], records with `continues`, `rows`, `head`, `inner` and `tail`, as formats.parquet.count has them.
        ends: int64 [num_pages], filled: documents with tokens that end in the page.
        flags: uint8 [num_pages], filled: the flags that hold of the page.
    """
    carried = np.int64(0)  # tokens, in earlier pages, of the row that is open at the page's beginning
    for i in range(len(pages)):
        page = pages[i]
        closes = i + 1 == len(pages) or not pages[i + 1]["continues"]
        flag = closes_flag if closes else 0
        ends[i] = page["inner"]
        open_tokens = carried + page["head"]
        if page["continues"]:
            flag |= continues_flag
            if carried > 0:
                flag |= carries_flag
            if page["rows"] > 0 and open_tokens > 0:
                ends[i] += 1
        last = page["tail"] if page["rows"] > 0 else open_tokens
        if closes and last > 0:
            ends[i] += 1
        carried = np.int64(0) if closes else last
        flags[i] = flag
