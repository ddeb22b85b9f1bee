"""Finding documents in a stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megablend.arrays import Int64s
from megablend.errors import CHANGED_REMEDY, CorruptFileError
from megablend.formats.base import (
    BLOCK_DTYPE,
    ENDS_AT_DOCUMENT_END,
    HAS_EARLIER_TOKENS,
    STARTS_MID_DOCUMENT,
    Array,
)


@dataclass(frozen=True, slots=True)
class Separator:
    """The token that separates documents, which is part of them."""

    token: int
    ends: bool
    """Whether it ends documents; otherwise it begins them."""

    def find_starts(self, tokens: Array) -> Int64s:
        """Positions in tokens [n] at which documents begin, without position 0: int64 [m], each
        above 0 and below n."""
        places = (
            np.flatnonzero(tokens[:-1] == self.token) + 1
            if self.ends
            else np.flatnonzero(tokens[1:] == self.token) + 1
        )
        return places.astype(np.int64)


def count_documents(blocks: Array, first: Int64s, starts: Int64s, num_tokens: int) -> None:
    """Fill rows, ends and flags of consecutive blocks.

    Args:
        blocks: BLOCK_DTYPE [n], whose `tokens` are known.
        first: int64 [n], the file's token that each block begins with.
        starts: int64 [m], the file's tokens that documents begin with, 0 not counted: at least
            those that are in the blocks or follow the last one; ascending.
        num_tokens: of the file.
    """
    stops = first + blocks["tokens"]
    begins = (first == 0) | np.isin(first, starts)
    is_end = (stops == num_tokens) | np.isin(stops, starts)
    inside = np.searchsorted(starts, stops, side="left") - np.searchsorted(
        starts, first, side="right"
    )
    blocks["rows"] = inside + begins
    blocks["ends"] = inside + is_end
    blocks["flags"] = np.where(begins, 0, STARTS_MID_DOCUMENT | HAS_EARLIER_TOKENS) | np.where(
        is_end, ENDS_AT_DOCUMENT_END, 0
    )


def make_blocks(layout_offset: int, token_bytes: int, first: Int64s, tokens: Int64s) -> Array:
    """Make blocks of these tokens, BLOCK_DTYPE [n], whose documents are not counted yet.

    Args:
        layout_offset: byte of the file's first token.
        first, tokens: int64 [n], the file's token that each block begins with, and how many it has.
    """
    blocks = np.zeros(len(first), BLOCK_DTYPE)
    blocks["offset"] = layout_offset + first * token_bytes
    blocks["tokens"] = tokens
    blocks["first_token"] = first
    blocks["stored_bytes"] = blocks["decoded_bytes"] = tokens * token_bytes
    return blocks


def find_offsets(
    path: str, block: np.void, separator: Separator | None, tokens: Array | None
) -> Int64s:
    """Offsets of the pieces of a block's documents: int64 [num_pieces + 1].

    Args:
        separator: None if no token separates documents, which then begin at most at the block's
            first token.
        tokens: [num_tokens] of the block; needed only with a separator.

    Raises: CorruptFileError if these are not the documents that were indexed.
    """
    inside = np.zeros(0, np.int64)
    if separator is not None and tokens is not None:
        inside = separator.find_starts(tokens)
    rows = len(inside) + 1 - bool(block["flags"] & STARTS_MID_DOCUMENT)
    if rows != block["rows"]:
        raise CorruptFileError(
            path,
            f"{rows} documents begin in a block of {block['tokens']} tokens, but {block['rows']} did when it was "
            f"indexed; {CHANGED_REMEDY}",
            offset=int(block["offset"]),
        )
    return np.concatenate(
        [np.zeros(1, np.int64), inside, np.full(1, int(block["tokens"]), np.int64)]
    )
