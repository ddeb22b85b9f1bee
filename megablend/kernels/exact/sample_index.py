"""Find where samples begin in concatenated documents: Megatron's sample index.

Sample k begins at token k * length. Its row is (document, token in the document), where the
document is the first one, in the order of the document index, that reaches token k * length +
extra: at a document's end, the row has this document and its full length, not the next document and
0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s
from megablend.intrinsics import prefetch
from megablend.jit import device, kernel

Rows = npt.NDArray[Any]
AHEAD = 128
"""Prefetch distance for lengths, in documents."""


@device
def fill_begun(
    document: int,
    start: int,
    reached: int,
    length: int,
    begin: int,
    row: int,
    rows: npt.NDArray[Any],
) -> tuple[int, int]:
    """Fill the rows of samples that begin at tokens begin, begin + length, ... up to `reached`, or
    until the rows are full.

    Args:
        document: the document in which the samples begin.
        start: number of tokens before the document.
        row: row of the first sample.

    Returns: the row and the first token of the next sample.
    """
    while begin <= reached and row < len(rows):
        rows[row, 0] = document
        rows[row, 1] = begin - start
        row += 1
        begin += length
    return row, begin


@kernel
def cut(
    lengths: Int32s,
    documents: Int32s,
    first: int,
    start: int,
    length: int,
    extra: int,
    sample: int,
    rows: Rows,
) -> tuple[int, int, int]:
    """Fill the rows of samples `sample`, `sample` + 1, ... until there are no more rows or
    documents.

    Args:
        lengths: int32 [num_lengths], 1 or more.
        documents: int32 [n], consecutive entries of the document index.
        first: position of documents[0] in the document index.
        start: number of tokens before documents[0].
        length: number of tokens from the start of one sample to the start of the next.
        extra: number of further tokens that a sample has.
        sample: the first sample that does not begin before these documents; 1 or more.
        rows: int32 or int64 [num_rows, 2], is filled.

    Returns: the number of rows that were filled; the number of documents that were passed, or -1 if
        a document is outside [0, num_lengths); the number of tokens before the next document.
    """
    # Unsigned: a signed index could be negative, and every access would check for that
    row = np.uint64(0)
    num_rows = np.uint64(len(rows))
    ahead = np.uint64(AHEAD)
    size = np.uint64(len(documents))
    limit = np.uint32(len(lengths))
    begin = sample * length
    end = start
    for i in range(size):
        if row == num_rows:
            return np.int64(row), np.int64(i), end
        later = np.uint64(i) + ahead
        if later < size:
            prefetch(lengths, documents[later])
        document = np.uint32(documents[i])
        if document >= limit:
            return np.int64(row), -1, end
        start = end
        end = end + np.int64(lengths[document])
        reached = end - extra
        position = first + np.int64(i)
        # Written whether or not it stays: a branch here would be mispredicted once a sample
        rows[row, 0] = position
        rows[row, 1] = begin - start
        if begin <= reached:
            row += np.uint64(1)
            begin += length
        if begin <= reached:
            filled, begin = fill_begun(position, start, reached, length, begin, np.int64(row), rows)
            row = np.uint64(filled)
            if begin <= reached:
                return np.int64(row), np.int64(i), start
    return np.int64(row), np.int64(size), end
