"""A faster equivalent of numpy.random.RandomState.shuffle, and the two arrays that Megatron
shuffles with that function: the document index and the shuffle index."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.kernels.exact import numpy_shuffle as kernels
from megablend.megatron.exact.epochs import shuffle_dtype

LARGE = 1 << 32
"""Number of entries above which numpy draws random words of 64 bits."""


class Generator:
    """A random generator that shuffles as numpy.random.RandomState(seed) does, and can do nothing
    else. (Creating a RandomState, and reading and setting its state, takes 0.2 ms, as long as
    shuffling a small dataset.)"""

    def __init__(self, seed: int) -> None:
        key, self.position = _seeded(seed)
        self.key = key.copy()
        """uint32 [624], the Mersenne Twister state."""

    def shuffle(self, array: npt.NDArray[Any]) -> None:
        """Shuffle `array` in place, and advance the generator, exactly as RandomState.shuffle does.

        Args:
            array: integers of 4 or 8 bytes [n], contiguous.
        """
        if len(array) <= LARGE:
            entries = np.asarray(array).view(np.uint32 if array.itemsize == 4 else np.uint64)
            self.position = kernels.shuffle(entries, self.key, self.position)
            return
        state = np.random.RandomState()
        state.set_state(("MT19937", self.key, self.position, 0, 0.0))
        state.shuffle(array)
        twister = state.get_state(legacy=False)["state"]
        self.key = twister["key"]
        self.position = twister["pos"]


@lru_cache(maxsize=8)
def _seeded(seed: int) -> tuple[npt.NDArray[np.uint32], int]:
    twister = np.random.RandomState(seed).get_state(legacy=False)["state"]
    return twister["key"], int(twister["pos"])


def document_index(
    documents: npt.NDArray[Any], num_epochs: int, generator: Generator, separate_final_epoch: bool
) -> npt.NDArray[np.int32]:
    """Make the document index: the numbers of the documents of all epochs, shuffled.

    Args:
        documents: integers [n], the numbers of the documents of a split.
        num_epochs: number of epochs, 1 or more.
        generator: advanced as Megatron advances its own.
        separate_final_epoch: whether the last epoch is shuffled by itself, rather than together
            with the others.

    Returns: int32 [num_epochs * n].
    Source: gpt_dataset._build_document_index.
    """
    index = np.empty((num_epochs, len(documents)), np.int32)
    # The same in every epoch
    index[:] = documents
    if separate_final_epoch and num_epochs > 1:
        generator.shuffle(index[:-1].reshape(-1))
        generator.shuffle(index[-1])
    else:
        generator.shuffle(index.reshape(-1))
    return index.reshape(-1)


def shuffle_index(first_samples: int, num_samples: int, generator: Generator) -> npt.NDArray[Any]:
    """Make the shuffle index: the shuffled numbers of the samples. The first `first_samples`
    samples and the remaining samples are shuffled separately.

    Args:
        first_samples: number of samples before a final epoch that is shuffled separately;
            num_samples if there is no such epoch.
        num_samples: number of samples in the sample index.
        generator: advanced as Megatron advances its own.

    Returns: uint32 [num_samples], or int64 from 2^32 - 2 samples on. `num_samples` may be less than
        `first_samples`, since it may be computed in single precision; the index then has
        `first_samples` entries, as in Megatron.
    Source: gpt_dataset._build_shuffle_index.
    """
    index = np.arange(max(first_samples, num_samples), dtype=shuffle_dtype(num_samples))
    generator.shuffle(index[:first_samples])
    generator.shuffle(index[first_samples:])
    return index
