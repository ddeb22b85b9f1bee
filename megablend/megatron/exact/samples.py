"""The sample index: where each sample begins in the shuffled documents.

Processes that share only files build one in parts:

1. Each process counts the tokens of its run of documents and sends the sums to all ranks.
2. Each process then knows the tokens before its run, and therefore which rows begin in it, and
   computes those rows.
"""

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
"""Documents that each of several threads processes at a time: 1 MiB of lengths stays in its CPU
cache."""
ROWS = 1 << 21
"""Rows that a thread computes at a time; approximate with several threads."""
SHORT = 12
"""Mean documents per sample from which on a kernel that assumes many documents per sample is
faster."""
FAR = 1 << 20
"""Bytes of lengths that fit in a core's own caches."""
_FEW = 1 / 64
"""The largest fraction of documents that may be too long for a byte."""
_NUM_EXAMINED = 4096
_NONE_LONG = 1 << 31


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
    """Split the documents into samples.

    Args:
        lengths: int32 [num_lengths], tokens of every document; at least one.
        documents: int32 [n], the document index: each in [0, num_lengths).
        length: tokens from one sample's start to the next one's, 1 or more.
        samples: number of samples, as computed by `num_samples`.
        dtype: int32 or int64, of the rows.
        extra: add_extra_token_to_sequence, 0 or 1.
        keep_tail: whether samples may end (or, because the count is rounded, begin) after the
            documents.
        threads: number of threads.

    Yields: the sample index, [samples + 1, 2], in consecutive parts of about `threads` * ROWS rows
        at most: position in the document index, tokens of that document before the sample.

    Raises: PlanError if the documents contain fewer samples, or if they end with an empty one
        at which Megatron fails.

    Source: helpers.build_sample_idx, helpers_cpp.build_sample_idx_int32,
        helpers_cpp.build_sample_idx_int64.
    """
    yield np.zeros((1, 2), dtype)
    sample = 1
    cutting = _serial if threads == 1 else partial(_parallel, threads=threads)
    for rows in cutting(lengths, documents, length, samples, extra, dtype):
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


def reached(tokens: int, length: int, samples: int, extra: int) -> int:
    """The first sample, at least 1, whose row is not within the first `tokens` tokens;
    samples + 1 if all are.

    The row of sample k is known once k * length + extra tokens were counted.
    """
    return min(max(1, (tokens - extra) // length + 1), samples + 1)


def end_row(
    last: int, documents: int, sample: int, samples: int, *, extra: int, keep_tail: bool
) -> tuple[int, int]:
    """The row of samples [sample, samples], which are after the documents.

    Args:
        last: tokens of the last document.
        documents: number of documents.

    Raises: PlanError if no sample may be there (without `keep_tail`), or if Megatron fails at
        that row.
    """
    if not keep_tail:
        raise PlanError(
            f"the documents contain {sample - 1:,} samples; expected {samples:,}: the lengths may be those of other documents"
        )
    if last < extra:
        raise PlanError(
            "the last of the shuffled documents is empty, and Megatron cannot keep a partial sample after it: "
            "drop the last partial sequence, or use another seed"
        )
    return documents - 1, last - extra


def no_such(documents: Int32s, lengths: Int32s) -> PlanError:
    """The error for a document index that refers to documents without a length."""
    return PlanError(
        f"the document index refers to documents {documents.min()} to {documents.max()}, but lengths are given for "
        f"{len(lengths)}; rebuild it for these documents"
    )


def _serial(
    lengths: Int32s, documents: Int32s, length: int, samples: int, extra: int, dtype: npt.DTypeLike
) -> Iterator[npt.NDArray[Any]]:
    """The rows of samples that end within the documents, ROWS at a time."""
    sample = 1
    document = 0
    tokens = 0
    cutting = _cutting(lengths, documents, samples)
    while sample <= samples and document < len(documents):
        rows = np.empty((min(ROWS, samples + 1 - sample), 2), dtype)
        left = documents[document:]
        filled, passed, tokens = cutting(
            lengths, left, document, tokens, length, extra, sample, rows
        )
        if passed < 0:
            raise no_such(documents, lengths)
        sample += filled
        document += passed
        yield rows[:filled]


def _cutting(
    lengths: Int32s, documents: Int32s, samples: int
) -> Callable[..., tuple[int, int, int]]:
    """The fastest kernel for this number of samples and documents; its signature is that of
    `cut`."""
    if len(documents) < SHORT * samples:
        return cut
    far = lengths.nbytes > FAR
    if far and 2 * len(documents) >= len(lengths):  # entries of the copy are read often enough
        seen = lengths.take(documents[:_NUM_EXAMINED], mode="clip")
        if np.count_nonzero(seen >= LONG) < _FEW * len(seen):
            short = np.empty(len(lengths), np.uint8)
            narrow_to_uint8(lengths, short)
            return partial(cut_short_documents, short, LONG, far)
    return partial(cut_short_documents, lengths, _NONE_LONG, far)


def _cut_gathered(lengths: Int32s, *args: Any) -> tuple[int, int, int]:
    """Split documents whose lengths are already in document-index order."""
    return cut_short_documents(lengths, _NONE_LONG, False, lengths, *args)


def _parallel(
    lengths: Int32s,
    documents: Int32s,
    length: int,
    samples: int,
    extra: int,
    dtype: npt.DTypeLike,
    threads: int,
) -> Iterator[npt.NDArray[Any]]:
    """Like `_serial`, a wave of document blocks at a time:
    lengths are gathered, summed, then split."""
    block = max(1, min(BLOCK, ROWS * len(documents) // max(1, samples)))
    scratch = np.empty((threads, min(block, len(documents))), np.int32)
    places = np.arange(block, dtype=np.int32)
    cutting = cut if len(documents) < SHORT * samples else _cut_gathered
    sample = 1
    tokens = 0
    with ThreadPoolExecutor(threads) as pool:
        for wave in range(0, len(documents), threads * block):
            firsts = range(wave, min(wave + threads * block, len(documents)), block)
            taken = [documents[first : first + block] for first in firsts]
            gathered = [space[: len(own)] for space, own in zip(scratch, taken, strict=False)]
            sums = list(pool.map(gather_lengths, repeat(lengths), taken, gathered))
            if min(sums) < 0:
                raise no_such(documents, lengths)
            starts = list(accumulate(sums, initial=tokens))
            bounds = [reached(start, length, samples, extra) for start in starts]
            rows = np.empty((bounds[-1] - sample, 2), dtype)
            pieces = [rows[low - sample : high - sample] for low, high in pairwise(bounds)]
            orders = [places[: len(own)] for own in taken]
            list(
                pool.map(
                    cutting,
                    gathered,
                    orders,
                    firsts,
                    starts,
                    repeat(length),
                    repeat(extra),
                    bounds,
                    pieces,
                )
            )
            yield rows
            tokens = starts[-1]
            sample = bounds[-1]


def count_run(
    lengths: Int32s, documents: Int32s, *, block: int = BLOCK
) -> tuple[Int32s, list[int]]:
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
    max_rows: int = ROWS,
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """The rows of the samples that begin in a run,
    except the row of sample 0 and those after all documents (`end_row`).

    Args:
        gathered, sums: the results of `count_run` for the run.
        first: position of the run in the document index.
        start: tokens before the run.
        length, samples, extra: as in sample_rows.
        dtype: dtype of the rows, int32 or int64.
        block: as in `count_run`.
        max_rows: how many rows are yielded at a time.

    Yields: a sample number, and the rows [n, 2] from that sample on.
    """
    places = np.arange(min(block, len(gathered)), dtype=np.int32)
    for number, tokens in enumerate(sums):
        begin = number * block
        counted = gathered[begin : begin + block]
        sample = reached(start, length, samples, extra)
        stop = reached(start + tokens, length, samples, extra)
        passed = 0
        before = start
        while sample < stop:
            rows = np.empty((min(stop - sample, max_rows), 2), dtype)
            left = places[passed : len(counted)]
            filled, more, before = cut(
                counted, left, first + begin + passed, before, length, extra, sample, rows
            )
            assert filled == len(rows)
            yield sample, rows
            sample += filled
            passed += more
        start += tokens
