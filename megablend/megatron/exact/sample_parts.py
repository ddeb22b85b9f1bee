"""A sample index built in parts by processes that share only files.

1. Each process counts the tokens of its run of documents and sends the sums to all ranks.
2. Each process then knows the tokens before its run, and therefore which rows begin in it, and computes those rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s
from megablend.kernels.exact.sample_index import cut, gather_lengths
from megablend.megatron.exact.samples import BLOCK, ROWS, end_row, no_such, reached


def count_run(lengths: Int32s, documents: Int32s, *, block: int = BLOCK) -> tuple[Int32s, list[int]]:
    """The lengths of a run of the document index, and the tokens of each block of it.

    Args:
        lengths: int32 [num_lengths], tokens of every document; at least one.
        documents: int32 [n], the run.
        block: documents of a block.

    Returns: int32 [n], for `cut_run`; and the sums of the blocks, the last of which may be shorter.
    Raises: PlanError if the run refers to a document without a length.
    """
    gathered = np.empty(len(documents), np.int32)
    sums = []
    for first in range(0, len(documents), block):
        part = slice(first, first + block)
        sums.append(gather_lengths(lengths, documents[part], gathered[part]))
        if sums[-1] < 0:
            raise no_such(documents, lengths)
    return gathered, sums


def cut_run(
    gathered: Int32s,
    sums: list[int],
    first: int,
    start: int,
    length: int,
    samples: int,
    *,
    extra: int,
    dtype: npt.DTypeLike,
    block: int = BLOCK,
    most_rows: int = ROWS,
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """The rows of the samples that begin in a run, except the rows of sample 0 and of `rows_after`.

    Args:
        gathered, sums: the results of `count_run` for the run.
        first: position of the run in the document index.
        start: tokens before the run.
        length, samples, extra: as in sample_index.
        dtype: dtype of the rows, int32 or int64.
        block: as in `count_run`.
        most_rows: how many rows are yielded at a time.

    Yields: a sample number, and the rows [n, 2] from that sample on.
    """
    places = np.arange(min(block, len(gathered)), dtype=np.int32)
    for number, tokens in enumerate(sums):
        begin, passed = number * block, 0
        counted = gathered[begin : begin + block]
        sample, stop = reached(start, length, samples, extra), reached(start + tokens, length, samples, extra)
        before = start
        while sample < stop:
            rows = np.empty((min(stop - sample, most_rows), 2), dtype)
            left = places[passed : len(counted)]
            filled, more, before = cut(counted, left, first + begin + passed, before, length, extra, sample, rows)
            assert filled == len(rows)
            yield sample, rows
            sample, passed = sample + filled, passed + more
        start += tokens


def rows_after(
    last: int,
    documents: int,
    tokens: int,
    length: int,
    samples: int,
    *,
    extra: int,
    keep_tail: bool,
    dtype: npt.DTypeLike,
) -> tuple[int, npt.NDArray[Any]]:
    """The rows of samples that begin after the last document.

    Args:
        last: tokens of the last document.
        documents, tokens: number of entries and tokens of the whole document index.

    The other arguments are as in sample_index.

    Returns: the number of the first such sample, and the rows [n, 2], often none.
    Raises: PlanError as sample_index does.
    """
    sample = reached(tokens, length, samples, extra)
    rows = np.empty((samples + 1 - sample, 2), dtype)
    if len(rows):
        rows[:] = end_row(last, documents, sample, samples, extra=extra, keep_tail=keep_tail)
    return sample, rows
