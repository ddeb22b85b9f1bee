"""Insert end-of-document tokens when blocks are read; no file is rewritten."""

from __future__ import annotations

import numpy as np

from megablend.formats.base import (
    ENDS_AT_DOCUMENT_END,
    HAS_EARLIER_TOKENS,
    STARTS_MID_DOCUMENT,
    DecodedBlock,
)
from megablend.kernels.reader.document_ends import count_ends, insert_ends


def with_eod(block: DecodedBlock, flags: int, eod: int) -> DecodedBlock:
    """Insert `eod` after each piece that ends a document with tokens; nothing is inserted for null
    and empty documents.

    Args:
        block: the block as its format decoded it.
        flags: the block's STARTS_MID_DOCUMENT | ENDS_AT_DOCUMENT_END | HAS_EARLIER_TOKENS.
        eod: token id; must fit the block's token dtype.
    """
    if len(block.offsets) < 2:
        return block
    continued = STARTS_MID_DOCUMENT | HAS_EARLIER_TOKENS
    first_has_earlier_tokens = flags & continued == continued
    last_ends = bool(flags & ENDS_AT_DOCUMENT_END)
    num_ends = count_ends(block.offsets, first_has_earlier_tokens, last_ends)
    tokens = np.empty(len(block.tokens) + num_ends, block.tokens.dtype)
    offsets = np.empty_like(block.offsets)
    insert_ends(
        block.tokens, block.offsets, first_has_earlier_tokens, last_ends, eod, tokens, offsets
    )
    return DecodedBlock(tokens, offsets)
