"""Compute the sample index: the position in the shuffled documents at which each sample begins. The
index has one row for each sample, and a last row for the end of the last sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s
from megablend.errors import PlanError
from megablend.kernels.exact.sample_index import cut, gather_lengths
from megablend.kernels.exact.short_documents import LONG, cut_short_documents, narrow_to_uint8

BLOCK = 1 << 18
"""Number of documents that a thread processes at a time if there are several threads: their lengths
(1 MiB) stay in its CPU cache."""
ROWS = 1 << 21
"""Number of rows that a thread computes at a time, approximately if there are several threads."""
SHORT = 12
"""Mean number of documents per sample above which the kernel for short documents is faster."""
FAR = 1 << 20
"""Number of bytes of lengths that fit in a core's own caches."""
_MAX_LONG_SHARE = 1 / 64
"""Lengths are copied to an array of bytes if less than this fraction of documents is too long for a
byte."""
_NUM_EXAMINED = 4096
"""Number of documents that are examined to estimate this fraction."""
_NONE_LONG = 1 << 31
"""A limit that no document's length reaches, for lengths that are not copied to bytes."""


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
    cut_kernel = _choose_kernel(lengths, documents, samples)
    while sample <= samples and document < len(documents):
        rows = np.empty((min(ROWS, samples + 1 - sample), 2), dtype)
        rest = documents[document:]
        filled, num_passed, tokens = cut_kernel(
            lengths, rest, document, tokens, length, extra, sample, rows
        )
        if num_passed < 0:
            raise missing_length_error(documents, lengths)
        sample += filled
        document += num_passed
        yield rows[:filled]


def _choose_kernel(
    lengths: Int32s, documents: Int32s, samples: int
) -> Callable[..., tuple[int, int, int]]:
    """Return the fastest kernel for these numbers of samples and documents; its signature is that
    of `cut`."""
    if len(documents) < SHORT * samples:
        return cut
    is_far = lengths.nbytes > FAR
    # Copying to bytes pays off if entries are read often enough, and few lengths are too long
    if is_far and 2 * len(documents) >= len(lengths):
        examined = lengths.take(documents[:_NUM_EXAMINED], mode="clip")
        if np.count_nonzero(examined >= LONG) < _MAX_LONG_SHARE * len(examined):
            as_bytes = np.empty(len(lengths), np.uint8)
            narrow_to_uint8(lengths, as_bytes)
            return partial(cut_short_documents, as_bytes, LONG, is_far)
    return partial(cut_short_documents, lengths, _NONE_LONG, is_far)


def _cut_gathered(lengths: Int32s, *args: Any) -> tuple[int, int, int]:
    """Split documents whose lengths are already in the order of the document index. The signature
    is that of the kernel `cut`."""
    return cut_short_documents(lengths, _NONE_LONG, False, lengths, *args)


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
    cut_kernel = cut if len(documents) < SHORT * samples else _cut_gathered
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
                    cut_kernel,
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
