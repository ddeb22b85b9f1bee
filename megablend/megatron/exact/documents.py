"""The document index and the shuffle index: ranges, shuffled by numpy's generator."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.megatron.exact.epochs import shuffle_dtype
from megablend.megatron.exact.shuffle import Generator


def document_index(
    documents: npt.NDArray[Any], num_epochs: int, generator: Generator, separate_final_epoch: bool
) -> npt.NDArray[np.int32]:
    """The documents of all epochs, shuffled together; the last epoch is shuffled separately on request.

    Args:
        documents: integers [n], the documents of a split.
        num_epochs: 1 or more.
        generator: advanced as Megatron advances it.
        separate_final_epoch: whether to shuffle the last epoch by itself.

    Returns: int32 [num_epochs * n].

    Source: gpt_dataset._build_document_index.
    """
    index = np.empty((num_epochs, len(documents)), np.int32)
    index[:] = documents  # in every epoch
    if separate_final_epoch and num_epochs > 1:
        generator.shuffle(index[:-1].reshape(-1))
        generator.shuffle(index[-1])
    else:
        generator.shuffle(index.reshape(-1))
    return index.reshape(-1)


def shuffle_index(first_samples: int, num_samples: int, generator: Generator) -> npt.NDArray[Any]:
    """Samples [0, first_samples), shuffled, then [first_samples, num_samples), shuffled.

    Args:
        first_samples: all samples, unless the final epoch is separate.
        num_samples: number of samples of the sample index.
        generator: advanced as Megatron advances it.

    Returns: uint32 [num_samples], or int64 from 2^32 - 2 samples on. Where single precision counted fewer samples than precede a
    separate final epoch, Megatron's index, and therefore this one, has first_samples entries.

    Source: gpt_dataset._build_shuffle_index.
    """
    index = np.arange(max(first_samples, num_samples), dtype=shuffle_dtype(num_samples))
    generator.shuffle(index[:first_samples])
    generator.shuffle(index[first_samples:])
    return index
