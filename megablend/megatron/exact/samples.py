"""The sample index: where each sample begins in the shuffled documents."""

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
from megablend.megatron.exact.epochs import sample_dtype

Part = Callable[[int, int], npt.NDArray[Any]]
"""Returns the array for the rows of samples [first, stop)."""

BLOCK = 1 << 18
"""Documents that each of several threads processes at a time: 1 MiB of lengths stays in its CPU cache."""
ROWS = 1 << 21
"""Rows that a thread computes at a time; approximate with several threads."""
SHORT = 12
"""Mean documents per sample from which on a kernel that assumes many documents per sample is faster."""
FAR = 1 << 20
"""Bytes of lengths that fit in a core's own caches."""
_FEW = 1 / 64
"""The largest fraction of documents that may be too long for a byte."""
_LOOKED_AT = 4096
_NONE_LONG = 1 << 31


def sample_index(
    lengths: Int32s,
    documents: Int32s,
    length: int,
    samples: int,
    *,
    extra: int,
    keep_tail: bool = False,
    dtype: npt.DTypeLike | None = None,
    threads: int = 1,
) -> npt.NDArray[Any]:
    """Split the documents into samples.

    Args:
        lengths: int32 [num_lengths], tokens of every document; at least one.
        documents: int32 [n], the document index: each in [0, num_lengths).
        length: tokens from one sample's start to the next one's, 1 or more.
        samples: number of samples, as computed by `num_samples`.
        extra: add_extra_token_to_sequence, 0 or 1.
        keep_tail: whether samples may end (or, because the count is rounded, begin) after the documents.
        dtype: int32 or int64; None for Megatron's choice.
        threads: number of threads.

    Returns: [samples + 1, 2]: position in the document index, tokens of that document before the sample.

    Raises: PlanError where the documents contain fewer samples, or where they end with an empty one at which Megatron fails.

    Source: helpers.build_sample_idx, helpers_cpp.build_sample_idx_int32, helpers_cpp.build_sample_idx_int64.
    """
    out = np.empty((samples + 1, 2), dtype or sample_dtype(len(documents)))
    for _ in sample_rows(lengths, documents, length, samples, out, extra=extra, keep_tail=keep_tail, threads=threads):
        pass
    return out


def sample_rows(
    lengths: Int32s,
    documents: Int32s,
    length: int,
    samples: int,
    out: npt.NDArray[Any] | npt.DTypeLike,
    *,
    extra: int,
    keep_tail: bool = False,
    threads: int = 1,
) -> Iterator[npt.NDArray[Any]]:
    """Yield the sample index in consecutive parts; arguments and errors as in sample_index.

    Args:
        out: the array to fill, [samples + 1, 2], parts of which are yielded; or a dtype: each part is then a new array of about
            `threads` * ROWS rows at most.
    """

    def part(first: int, stop: int) -> npt.NDArray[Any]:
        return out[first:stop] if isinstance(out, np.ndarray) else np.empty((stop - first, 2), out)

    first = part(0, 1)
    first[:] = 0
    yield first
    sample = 1
    cutting = _serial if threads == 1 else partial(_parallel, threads=threads)
    for rows in cutting(lengths, documents, length, samples, extra, part):
        sample += len(rows)
        yield rows
    if sample <= samples:
        end = end_row(int(lengths[documents[-1]]), len(documents), sample, samples, extra=extra, keep_tail=keep_tail)
        rows = part(sample, samples + 1)
        rows[:] = end
        yield rows


def reached(tokens: int, length: int, samples: int, extra: int) -> int:
    """The first sample, at least 1, whose row is not within the first `tokens` tokens; samples + 1 if all are.

    The row of sample k is known once k * length + extra tokens were counted.
    """
    return min(max(1, (tokens - extra) // length + 1), samples + 1)


def end_row(last: int, documents: int, sample: int, samples: int, *, extra: int, keep_tail: bool) -> tuple[int, int]:
    """The row of samples [sample, samples], which are after the documents.

    Args:
        last: tokens of the last document.
        documents: number of documents.

    Raises: PlanError where no sample may be there (without `keep_tail`), or where Megatron fails at that row.
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
    lengths: Int32s, documents: Int32s, length: int, samples: int, extra: int, part: Part
) -> Iterator[npt.NDArray[Any]]:
    """The rows of samples that end within the documents, ROWS at a time."""
    sample, document, tokens = 1, 0, 0
    cutting = _cutting(lengths, documents, samples)
    while sample <= samples and document < len(documents):
        rows = part(sample, min(sample + ROWS, samples + 1))
        left = documents[document:]
        filled, passed, tokens = cutting(lengths, left, document, tokens, length, extra, sample, rows)
        if passed < 0:
            raise no_such(documents, lengths)
        sample, document = sample + filled, document + passed
        yield rows[:filled]


def _cutting(lengths: Int32s, documents: Int32s, samples: int) -> Callable[..., tuple[int, int, int]]:
    """The fastest kernel for this number of samples and documents; its signature is that of `cut`."""
    if len(documents) < SHORT * samples:
        return cut
    far = lengths.nbytes > FAR
    if far and 2 * len(documents) >= len(lengths):  # entries of the copy are read often enough
        seen = lengths.take(documents[:_LOOKED_AT], mode="clip")
        if np.count_nonzero(seen >= LONG) < _FEW * len(seen):
            short = np.empty(len(lengths), np.uint8)
            narrow_to_uint8(lengths, short)
            return partial(cut_short_documents, short, LONG, far)
    return partial(cut_short_documents, lengths, _NONE_LONG, far)


def _cut_gathered(lengths: Int32s, *args: Any) -> tuple[int, int, int]:
    """Split documents whose lengths are already in document-index order."""
    return cut_short_documents(lengths, _NONE_LONG, False, lengths, *args)


def _parallel(
    lengths: Int32s, documents: Int32s, length: int, samples: int, extra: int, part: Part, threads: int
) -> Iterator[npt.NDArray[Any]]:
    """Like `_serial`, a wave of document blocks at a time: lengths are gathered, summed, then split."""
    block = max(1, min(BLOCK, ROWS * len(documents) // max(1, samples)))
    scratch = np.empty((threads, min(block, len(documents))), np.int32)
    places = np.arange(block, dtype=np.int32)
    cutting = cut if len(documents) < SHORT * samples else _cut_gathered
    sample, tokens = 1, 0
    with ThreadPoolExecutor(threads) as pool:
        run = map if threads == 1 else pool.map  # starting a thread takes as long as a small dataset
        for wave in range(0, len(documents), threads * block):
            firsts = range(wave, min(wave + threads * block, len(documents)), block)
            taken = [documents[first : first + block] for first in firsts]
            gathered = [space[: len(own)] for space, own in zip(scratch, taken, strict=False)]
            sums = list(run(gather_lengths, repeat(lengths), taken, gathered))
            if min(sums) < 0:
                raise no_such(documents, lengths)
            starts = list(accumulate(sums, initial=tokens))
            bounds = [reached(start, length, samples, extra) for start in starts]
            rows = part(sample, bounds[-1])
            pieces = [rows[low - sample : high - sample] for low, high in pairwise(bounds)]
            orders = [places[: len(own)] for own in taken]
            list(run(cutting, gathered, orders, firsts, starts, repeat(length), repeat(extra), bounds, pieces))
            yield rows
            tokens, sample = starts[-1], bounds[-1]
