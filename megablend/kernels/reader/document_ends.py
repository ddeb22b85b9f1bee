"""Insert a token after each document of a block."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.jit import device, kernel


@kernel
def count_ends(offsets: Int64s, carried: bool, closes: bool) -> int:
    """Return how many pieces end a document that has tokens; see `insert_ends`."""
    count = 0
    for piece in range(len(offsets) - 1):
        count += _ends(offsets, piece, carried, closes)
    return count


@kernel
def insert_ends(
    tokens: npt.NDArray[Any],
    offsets: Int64s,
    carried: bool,
    closes: bool,
    end: int,
    out: npt.NDArray[Any],
    out_offsets: Int64s,
) -> None:
    """Copy tokens, with `end` after each piece that ends a document that has tokens.

    Args:
        tokens: [num_tokens].
        offsets: int64 [num_pieces + 1], ascending from 0 to num_tokens.
        carried: whether the first piece continues a document that had tokens before.
        closes: whether the document of the last piece ends with it.
        out: [num_tokens + count_ends(...)], of the tokens' type, is filled.
        out_offsets: int64 [num_pieces + 1], is filled with the pieces' offsets in `out`.
    """
    filled = 0
    for piece in range(len(offsets) - 1):
        out_offsets[piece] = filled
        for i in range(offsets[piece], offsets[piece + 1]):
            out[filled] = tokens[i]
            filled += 1
        if _ends(offsets, piece, carried, closes):
            out[filled] = end
            filled += 1
    out_offsets[len(offsets) - 1] = filled


@device
def _ends(offsets: Int64s, piece: int, carried: bool, closes: bool) -> bool:
    """Return whether a piece ends a document that has tokens."""
    has_tokens = offsets[piece + 1] > offsets[piece] or (piece == 0 and carried)
    return has_tokens and (piece + 2 < len(offsets) or closes)
