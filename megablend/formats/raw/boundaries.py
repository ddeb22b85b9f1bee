"""Find documents in a stream of tokens, and count them by block."""

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
    """The token that separates documents; it is part of the document that it ends or begins."""

    token: int
    ends: bool
    """Whether the token ends documents; otherwise it begins them."""

    def find_starts(self, tokens: Array) -> Int64s:
        """Return the positions in `tokens` [n] at which documents begin, except position 0:
        int64 [m], each above 0 and below n."""
        candidates = tokens[:-1] if self.ends else tokens[1:]
        starts = np.flatnonzero(candidates == self.token) + 1
        return starts.astype(np.int64)


def count_documents(blocks: Array, first: Int64s, starts: Int64s, num_tokens: int) -> None:
    """Fill rows, ends and flags of consecutive blocks.

    Args:
        blocks: BLOCK_DTYPE [n], whose `tokens` are known.
        first: int64 [n], position in the file of each block's first token.
        starts: int64 [m], positions in the file at which documents begin, ascending and without 0.
            It must contain all that are in the blocks, and the position after the blocks if a
            document begins there.
        num_tokens: number of tokens of the file.
    """
    stops = first + blocks["tokens"]
    begins = (first == 0) | np.isin(first, starts)
    is_end = (stops == num_tokens) | np.isin(stops, starts)
    # Documents that begin within each block, not at its first token
    num_inside = np.searchsorted(starts, stops, side="left") - np.searchsorted(
        starts, first, side="right"
    )
    blocks["rows"] = num_inside + begins
    blocks["ends"] = num_inside + is_end
    start_flags = np.where(begins, 0, STARTS_MID_DOCUMENT | HAS_EARLIER_TOKENS)
    blocks["flags"] = start_flags | np.where(is_end, ENDS_AT_DOCUMENT_END, 0)


def make_blocks(layout_offset: int, token_bytes: int, first: Int64s, tokens: Int64s) -> Array:
    """Make the block table of ranges of tokens, BLOCK_DTYPE [n]; documents are not counted yet.

    Args:
        layout_offset: offset in bytes of the file's first token.
        first: int64 [n], position in the file of each block's first token.
        tokens: int64 [n], number of tokens of each block.
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
    """Find the offsets of the pieces of a block's documents: int64 [num_pieces + 1].

    Args:
        separator: the token that separates documents; None if there is none, so that a document can
            begin only at the block's first token.
        tokens: [num_tokens], tokens of the block; needed only with a separator.

    Raises: CorruptFileError if the number of documents is not the one that was indexed.
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
