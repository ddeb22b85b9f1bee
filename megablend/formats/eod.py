"""End-of-document tokens put in as blocks are read; nothing is rewritten."""

from __future__ import annotations

import numpy as np

from megablend.formats.base import CARRIES, CLOSES, CONTINUES, DecodedBlock


def with_eod(block: DecodedBlock, flags: int, eod: int) -> DecodedBlock:
    """The block with `eod` after each piece that ends a document with tokens; null and empty documents get none.

    Args:
        block: as its format decoded it.
        flags: the block's CONTINUES | CLOSES | CARRIES.
        eod: token id; must fit the block's token dtype.
    """
    num_pieces = len(block.offsets) - 1
    if num_pieces < 1:
        return block
    ends = np.diff(block.offsets) > 0
    if flags & CONTINUES and flags & CARRIES:
        ends[0] = True
    if not flags & CLOSES:
        ends[-1] = False
    tokens = np.insert(block.tokens, block.offsets[1:][ends], eod)
    offsets = block.offsets + np.concatenate([[0], np.cumsum(ends)])
    return DecodedBlock(tokens, offsets)
