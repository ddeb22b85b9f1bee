"""Compute the sample index: the position in the shuffled documents at which each sample begins. The
index has one row for each sample, and a last row for the end of the last sample."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s
from megablend.errors import PlanError
from megablend.kernels.exact.sample_index import cut, gather_lengths

BLOCK = 1 << 18
"""Number of documents that a thread processes at a time if there are several threads: their lengths
(1 MiB) stay in its CPU cache."""
ROWS = 1 << 21
"""Number of rows that a thread computes at a time, approximately if there are several threads."""


def sample_rows(
    lengths: Int32s,
    documents: Int32s,
    length: int,
    samples: int,
    *,
    dtype: npt.DTypeLike,
    extra: int,
    keep_tail: bool = False,
    threads: int = 1,
) -> Iterator[npt.NDArray[Any]]:
    """Compute the sample index by splitting the shuffled documents into samples.

    Args:
        lengths: int32 [num_lengths], number of tokens of every document; at least one document.
        documents: int32 [n], the document index, with entries in [0, num_lengths).
        length: number of tokens from the start of a sample to the start of the next, 1 or more.
        samples: number of samples, as computed by `num_samples`.
        dtype: dtype of the rows, int32 or int64.
        extra: add_extra_token_to_sequence, 0 or 1.
        keep_tail: whether samples may end after the last document. (They may even begin after it,
            because the number of samples is rounded.)
        threads: number of threads.

    Yields: the sample index, [samples + 1, 2], in consecutive parts of about `threads` * ROWS rows
        at most. A row consists of a position in the document index, and the number of tokens
        of that document before the sample.

    Raises: PlanError if the documents contain fewer samples, or if they end with an empty document
        on which Megatron fails.

    Source: helpers.build_sample_idx, helpers_cpp.build_sample_idx_int32,
        helpers_cpp.build_sample_idx_int64.
    """
    yield np.zeros((1, 2), dtype)
    sample = 1
    cut_rows = _cut_serially if threads == 1 else partial(_cut_in_parallel, threads=threads)
    for rows in cut_rows(lengths, documents, length, samples, extra, dtype):
        sample += len(rows)
        yield rows
    if sample <= samples:
        end = end_row(
            int(lengths[documents[-1]]),
            len(documents),
            sample,
            samples,
            extra=extra,
            keep_tail=keep_tail,
        )
        yield np.full((samples + 1 - sample, 2), end, dtype)


def _reached(tokens: int, length: int, samples: int, extra: int) -> int:
    """Return the number of the first sample, at least 1, whose row cannot be computed from the
    first `tokens` tokens; samples + 1 if all rows can be computed. The row of sample k requires k *
    length + extra tokens."""
    return min(max(1, (tokens - extra) // length + 1), samples + 1)


def end_row(
    last: int, documents: int, sample: int, samples: int, *, extra: int, keep_tail: bool
) -> tuple[int, int]:
    """Return the row that samples `sample` to `samples` have in common, because they all begin or
    end after the last document.

    Args:
        last: number of tokens of the last document.
        documents: number of documents.

    Raises: PlanError if `keep_tail` is false, since the documents must then contain all samples, or
        if Megatron would fail on this row.
    """
    if not keep_tail:
        raise PlanError(
            f"the documents' lengths are enough for {sample - 1:,} samples, but {samples:,} were planned; an .idx file may "
            "have changed in the meantime: build again"
        )
    if last < extra:
        raise PlanError(
            "the last of the shuffled documents is empty, and Megatron cannot keep a partial sample after it: "
            "drop the last partial sequence, or use another seed"
        )
    return documents - 1, last - extra


def missing_length_error(documents: Int32s, lengths: Int32s) -> PlanError:
    """Return the error for a document index that refers to documents without a length."""
    return PlanError(
        f"the document index refers to documents {documents.min()} to {documents.max()}, but lengths are given for "
        f"only {len(lengths)}; rebuild the index for these documents"
    )


def _cut_serially(
    lengths: Int32s, documents: Int32s, length: int, samples: int, extra: int, dtype: npt.DTypeLike
) -> Iterator[npt.NDArray[Any]]:
    """Compute the rows of samples that end within the documents, in one thread. Yields at most ROWS
    rows at a time."""
    sample = 1
    document = 0
    tokens = 0
    while sample <= samples and document < len(documents):
        rows = np.empty((min(ROWS, samples + 1 - sample), 2), dtype)
        rest = documents[document:]
        filled, num_passed, tokens = cut(
            lengths, rest, document, tokens, length, extra, sample, rows
        )
        if num_passed < 0:
            raise missing_length_error(documents, lengths)
        sample += filled
        document += num_passed
        yield rows[:filled]


def _cut_in_parallel(
    lengths: Int32s,
    documents: Int32s,
    length: int,
    samples: int,
    extra: int,
    dtype: npt.DTypeLike,
    threads: int,
) -> Iterator[npt.NDArray[Any]]:
    """Yield the rows of samples that end within the documents, computed by several threads. The
    threads process one block of documents each at the same time: first they gather and sum the
    lengths of their blocks, then they compute the rows."""
    block = max(1, min(BLOCK, ROWS * len(documents) // max(1, samples)))
    scratch = np.empty((threads, min(block, len(documents))), np.int32)
    # Gathered lengths are in the order of the block: entry i belongs to its document i
    identity = np.arange(block, dtype=np.int32)
    sample = 1
    tokens = 0
    with ThreadPoolExecutor(threads) as pool:
        for wave in range(0, len(documents), threads * block):
            firsts = range(wave, min(wave + threads * block, len(documents)), block)
            blocks = [documents[first : first + block] for first in firsts]
            gathered = [memory[: len(each)] for memory, each in zip(scratch, blocks, strict=False)]
            sums = list(pool.map(gather_lengths, repeat(lengths), blocks, gathered))
            if min(sums) < 0:
                raise missing_length_error(documents, lengths)
            # For each block: the tokens before it, and the first sample whose row begins in it
            tokens_before = list(accumulate(sums, initial=tokens))
            first_samples = [_reached(before, length, samples, extra) for before in tokens_before]
            rows = np.empty((first_samples[-1] - sample, 2), dtype)
            parts = [rows[low - sample : high - sample] for low, high in pairwise(first_samples)]
            orders = [identity[: len(each)] for each in blocks]
            # In the order of the kernel's parameters
            list(
                pool.map(
                    cut,
                    gathered,
                    orders,
                    firsts,
                    tokens_before,
                    repeat(length),
                    repeat(extra),
                    first_samples,
                    parts,
                )
            )
            yield rows
            tokens = tokens_before[-1]
            sample = first_samples[-1]
