"""Compute the sample index: the position in the shuffled documents at which each sample begins. The
index has one row for each sample, and a last row for the end of the last sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s
from megablend.errors import PlanError
from megablend.kernels.exact.sample_index import cut

ROWS = 1 << 21
"""Maximum number of rows of int32 that are computed at a time, 16 MiB; of int64, half as many."""


def sample_rows(
    lengths: Int32s,
    documents: Int32s,
    length: int,
    samples: int,
    *,
    dtype: npt.DTypeLike,
    extra: int,
    keep_tail: bool = False,
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

    Yields: the sample index, [samples + 1, 2], in consecutive parts of at most ROWS rows. A row
        consists of a position in the document index, and the number of tokens of that document
        before the sample.

    Raises: PlanError if the documents contain fewer samples, or if they end with an empty document
        on which Megatron fails.

    Source: helpers.build_sample_idx, helpers_cpp.build_sample_idx_int32,
        helpers_cpp.build_sample_idx_int64.
    """
    yield np.zeros((1, 2), dtype)
    sample = 1
    document = 0
    tokens = 0
    max_rows = max(1, 4 * ROWS // np.dtype(dtype).itemsize)
    while sample <= samples and document < len(documents):
        rows = np.empty((min(max_rows, samples + 1 - sample), 2), dtype)
        rest = documents[document:]
        filled, num_passed, tokens = cut(
            lengths, rest, document, tokens, length, extra, sample, rows
        )
        if num_passed < 0:
            raise PlanError(
                f"the document index refers to documents {documents.min()} to {documents.max()}, but lengths are given for "
                f"only {len(lengths)}; rebuild the index for these documents"
            )
        sample += filled
        document += num_passed
        yield rows[:filled]
        del rows  # before the next ones are made
    if sample <= samples:
        end = _end_row(
            int(lengths[documents[-1]]),
            len(documents),
            sample,
            samples,
            extra=extra,
            keep_tail=keep_tail,
        )
        yield np.full((samples + 1 - sample, 2), end, dtype)


def _end_row(
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
            f"the documents are long enough for {sample - 1:,} samples only, but {samples:,} were planned; an .idx file may "
            "have changed in the meantime: build again"
        )
    if last < extra:
        raise PlanError(
            "the last of the shuffled documents is empty, and Megatron cannot keep a partial sample after it: "
            "drop the last partial sequence, or use another seed"
        )
    return documents - 1, last - extra
