"""Find where samples begin in documents much shorter than a sample: the result of
megablend.kernels.exact.sample_index.cut, faster.

Only one of dozens of documents contains the start of a sample, so predicting that none begins is
nearly always right and cheaper than computing it. The remaining time is spent waiting for the
lengths, which are scattered in memory: they may be stored in one byte each if most of them fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s, Uint8s
from megablend.intrinsics import prefetch
from megablend.jit import device, kernel
from megablend.kernels.exact.sample_index import fill_begun

LONG = 255
"""The largest value of a byte, which stands for this number of tokens or more."""
AHEAD = 64
"""Prefetch distance for lengths, in documents."""


@kernel
def narrow_to_uint8(lengths: Int32s, out: Uint8s) -> None:
    """Convert non-negative lengths, int32 [n], to bytes, uint8 [n]. Lengths that do not fit become
    LONG."""
    for i in range(len(lengths)):
        out[i] = min(lengths[i], np.int32(LONG))


@kernel
def cut_short_documents(
    short: npt.NDArray[Any],
    limit: int,
    far: bool,
    lengths: Int32s,
    documents: Int32s,
    first: int,
    start: int,
    length: int,
    extra: int,
    sample: int,
    rows: npt.NDArray[Any],
) -> tuple[int, int, int]:
    """Fill rows as megablend.kernels.exact.sample_index.cut does. The arguments that are not
    listed, and the results, are the same.

    Args:
        short: the lengths as `narrow_to_uint8` gives them, or the lengths themselves.
        limit: entries of `short` below it are lengths; for others, `lengths` is looked up.
        far: whether `short` is larger than a core's own caches.
    """
    row = 0
    end = start
    size = len(documents)
    begin = sample * length
    num_lengths = np.uint32(len(lengths))
    ahead = AHEAD if far else size
    for i in range(size):
        if i + ahead < size:
            prefetch(short, documents[i + ahead])
        document = np.uint32(documents[i])
        if document >= num_lengths:
            return row, -1, end
        tokens = np.int64(short[document])
        if tokens >= limit:
            tokens = np.int64(lengths[document])
        start = end
        end = end + tokens
        if begin <= end - extra:
            row, begin = fill_begun(first + i, start, end - extra, length, begin, row, rows)
            if begin <= end - extra:
                return row, i, start
    return row, size, end


cut_short_rows = device(cut_short_documents)
"""The function `cut_short_documents`, for other kernels to call."""
