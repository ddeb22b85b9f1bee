"""Compute the first token of documents, from the lengths of all documents and running counts at
regular intervals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.jit import device, kernel


@kernel
def add_lengths(
    lengths: npt.NDArray[np.int32],
    every: int,
    end_tokens: int,
    documents: Int64s,
    counts: Int64s,
    starts: Int64s,
) -> int:
    """Add to starts[i] the number of tokens of the documents from the last multiple of `every` up
    to but excluding documents[i].

    Args:
        lengths: int32 [n], tokens of each document.
        end_tokens: tokens that are added to each document that has tokens.
        documents: int64 [m], each from 0 to n.
        counts: int64 [m], expected number of tokens of the documents from that multiple of `every`
            to the next one, or to n.
        starts: int64 [m], to which the numbers are added.

    Returns: the first i for which the documents do not have counts[i] tokens; -1 if there is none.
    """
    for i in range(len(documents)):
        document = documents[i]
        first = document // every * every
        before = _tokens(lengths[first:document], end_tokens)
        if before + _tokens(lengths[document : first + every], end_tokens) != counts[i]:
            return i
        starts[i] += before
    return -1


@device
def _tokens(lengths: npt.NDArray[np.int32], end_tokens: int) -> int:
    """Return the number of tokens of documents, including the added ones."""
    total = 0
    for length in lengths:
        total += np.int64(length) + end_tokens * (length > 0)
    return total
