"""Make all three arrays of many small Megatron datasets in one call, so that thousands of datasets
need few Python operations.

The operations and the order of random draws are those of megablend.megatron.exact.epochs and
megablend.megatron.exact.samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int32s, Int64s, Uint32s
from megablend.intrinsics import bytes_at
from megablend.jit import device, kernel
from megablend.kernels.exact.numpy_shuffle import shuffle_entries
from megablend.kernels.exact.sample_index import cut_rows
from megablend.kernels.exact.short_documents import cut_short_rows

_ANY_LENGTH = 1 << 31
"""A number greater than any length."""


@kernel
def fill_datasets(
    numbers: Int64s,
    key: Uint32s,
    position: int,
    length: int,
    extra: int,
    many: int,
    near: int,
    memory: Int32s,
    filled: Int64s,
) -> None:
    """Fill the document, sample and shuffle index of each dataset. The caller fills the last rows
    of a sample index, which the dataset's documents do not reach.

    Args:
        numbers: int64 [n, 10], a row for each dataset, with these columns:
            0: address of the lengths of its documents in tokens, int32, which the caller keeps
                alive;
            1: number of documents, 1 or more;
            2: number of the first document;
            3: number of entries of the document index;
            4: how many of these entries are shuffled first, before the others;
            5: number of samples;
            6: how many of these samples are shuffled first, before the others;
            7, 8, 9: where in `memory` its document, sample and shuffle index begin.
        key, position: the state of the generator of every dataset, see
            megablend.kernels.exact.numpy_shuffle.shuffle.
        length: number of tokens from the start of one sample to the start of the next.
        extra: number of further tokens that a sample has.
        many: number of documents per sample from which the kernel for short documents is faster.
        near: number of documents whose lengths fit in a core's own caches.
        memory: int32, filled; the caller has checked that it has room for each dataset's int32
            [entries], int32 [samples + 1, 2] and uint32 [samples].
        filled: int64 [n], set to the rows of the sample index that are filled.
    """
    unsigned = memory.view(np.uint32)
    for i in range(len(numbers)):
        lengths_address, num_documents, begin, entries, together = numbers[i, :5]
        num_samples, first_samples, documents_at, rows_at, samples_at = numbers[i, 5:]
        documents = memory[documents_at : documents_at + entries]
        rows = memory[rows_at : rows_at + 2 * (num_samples + 1)].reshape((num_samples + 1, 2))
        samples = unsigned[samples_at : samples_at + num_samples]
        short = entries >= many * num_samples
        filled[i] = _fill_dataset(
            bytes_at(lengths_address, 4 * num_documents).view(np.int32),
            begin,
            together,
            key.copy(),
            position,
            length,
            extra,
            short,
            num_documents > near,
            first_samples,
            documents,
            rows,
            samples,
        )


@device
def _fill_dataset(
    lengths: Int32s,
    begin: int,
    shuffled_together: int,
    key: Uint32s,
    position: int,
    length: int,
    extra: int,
    short: bool,
    far: bool,
    first_samples: int,
    documents: Int32s,
    rows: npt.NDArray[np.int32],
    samples: Uint32s,
) -> int:
    """Fill the arrays of one dataset. Returns the number of rows of the sample index that are
    filled."""
    num_documents = len(lengths)
    for first in range(0, len(documents), num_documents):
        for i in range(num_documents):
            documents[first + i] = i
    position = shuffle_entries(documents[:shuffled_together], key, position)
    position = shuffle_entries(documents[shuffled_together:], key, position)
    rows[0, 0] = rows[0, 1] = 0
    if short:
        filled = cut_short_rows(
            lengths, _ANY_LENGTH, far, lengths, documents, 0, 0, length, extra, 1, rows[1:]
        )[0]
    else:
        filled = cut_rows(lengths, documents, 0, 0, length, extra, 1, rows[1:])[0]
    if begin:
        for i in range(len(documents)):
            documents[i] += begin
    for i in range(len(samples)):
        samples[i] = i
    position = shuffle_entries(samples[:first_samples], key, position)
    shuffle_entries(samples[first_samples:], key, position)
    return 1 + filled
