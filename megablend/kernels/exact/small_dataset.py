"""All three arrays of a small dataset of Megatron's, in one call: thousands of datasets cost one step of Python each.

The operations and the order of random draws are those of megablend.exact.documents and megablend.exact.samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.jit import kernel
from megablend.kernels.exact.numpy_shuffle import shuffle_entries
from megablend.kernels.exact.random_state import Uint32s
from megablend.kernels.exact.sample_index import Int32s, cut_rows
from megablend.kernels.exact.short_documents import cut_short_rows

_ANY_LENGTH = 1 << 31


@kernel
def fill_dataset(
    lengths: Int32s,
    begin: int,
    shuffled_together: int,
    key: Uint32s,
    position: int,
    length: int,
    extra: int,
    short: bool,
    first_samples: int,
    documents: Int32s,
    rows: npt.NDArray[np.int32],
    samples: Uint32s,
) -> int:
    """Fill the document, sample and shuffle index. Returns the rows that the documents fill; the caller fills the others.

    Args:
        lengths: int32 [n], tokens of documents `begin` to `begin` + n; 1 or more documents.
        shuffled_together: entries of `documents` that are shuffled first; then the others.
        key, position: of the generator, as megablend.kernels.exact.numpy_shuffle.shuffle takes them; the key advances.
        length: tokens from one sample's start to the next one's.
        extra: further tokens that a sample takes.
        short: whether documents are much shorter than a sample.
        first_samples: entries of `samples` that are shuffled first; then the others.
        documents: int32 [epochs * n], filled.
        rows: int32 [len(samples) + 1, 2], filled as far as the documents reach.
        samples: uint32 [num_samples], filled.
    """
    num_documents = len(lengths)
    for first in range(0, len(documents), num_documents):
        for i in range(num_documents):
            documents[first + i] = i
    position = shuffle_entries(documents[:shuffled_together], key, position)
    position = shuffle_entries(documents[shuffled_together:], key, position)
    rows[0, 0] = rows[0, 1] = 0
    if short:
        filled = cut_short_rows(lengths, _ANY_LENGTH, False, lengths, documents, 0, 0, length, extra, 1, rows[1:])[0]
    else:
        filled = cut_rows(lengths, documents, 0, 0, length, extra, 1, rows[1:])[0]
    for i in range(len(documents)):
        documents[i] += begin
    for i in range(len(samples)):
        samples[i] = i
    position = shuffle_entries(samples[:first_samples], key, position)
    shuffle_entries(samples[first_samples:], key, position)
    return 1 + filled
