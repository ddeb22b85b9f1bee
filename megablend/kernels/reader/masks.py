"""Compute the position ids, document lengths and attention masks of a batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import kernel

Begins = npt.NDArray[np.bool_]


@kernel
def count_positions(begins: Begins, out: npt.NDArray[np.int64]) -> None:
    """Number the tokens of each document in each row from 0.

    Args:
        begins: bool [n, length], set where documents begin.
        out: int64 [n, length], filled with the numbers.
    """
    for i in range(out.shape[0]):
        position = 0
        for j in range(out.shape[1]):
            if begins[i, j]:
                position = 0
            out[i, j] = position
            position += 1


@kernel
def document_ends(
    begins: Begins, ends: npt.NDArray[np.int32], longest: npt.NDArray[np.int32]
) -> None:
    """Find the ends of each row's documents.

    Args:
        begins: bool [n, length], set where documents begin, and at 0.
        ends: int32 [n, length + 1], filled with 0, each document's end, and `length` in the rest.
        longest: int32 [n], filled with the length of the longest document.
    """
    length = begins.shape[1]
    for i in range(begins.shape[0]):
        filled = 0
        begin = 0
        longest_so_far = 0
        for j in range(length):
            if begins[i, j]:
                # The previous document ends where this one begins; for the first one, that is 0
                ends[i, filled] = j
                filled += 1
                longest_so_far = max(longest_so_far, j - begin)
                begin = j
        longest[i] = max(longest_so_far, length - begin)
        ends[i, filled:] = length


@kernel
def fill_causal_mask(begins: Begins, out: npt.NDArray[np.bool_]) -> None:
    """Compute the attention mask that hides later tokens and earlier documents from each token.

    Args:
        begins: bool [n, length], set where documents begin.
        out: bool [n, 1, length, length], is filled: True if the row's token must not attend to the
            column's.
    """
    for i in range(begins.shape[0]):
        first = 0
        for row in range(begins.shape[1]):
            if begins[i, row]:
                first = row
            out[i, 0, row, :first] = True
            out[i, 0, row, first : row + 1] = False
            out[i, 0, row, row + 1 :] = True
