"""Compute the document, sample and shuffle index of many small datasets by one kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int32s
from megablend.kernels.exact.small_dataset import fill_datasets
from megablend.megatron.exact.samples import FAR, SHORT, end_row
from megablend.megatron.exact.shuffle import Generator

MAX_DOCUMENTS = 1 << 20
"""Maximum number of documents in an epoch of a small dataset."""
_NEAR = FAR // 4
"""Number of documents whose lengths fit in a core's own caches."""


class SmallDataset(NamedTuple):
    """A small dataset, and where its indices are placed in a buffer that all small datasets share.
    Places are counted in units of 4 bytes."""

    lengths: Int32s
    """Number of tokens of documents `begin` to `begin` + n (int32 [n], contiguous). n is 1 to
    MAX_DOCUMENTS."""
    begin: int
    """Number of the first document."""
    num_entries: int
    """Number of entries of the document index: epochs * n."""
    num_samples: int
    samples_before_final: int | None
    """Number of samples of all epochs but the last, at most num_samples, if the last epoch is
    shuffled separately; otherwise None."""
    keep_tail: bool
    """Whether samples may end after the last document."""
    documents: int
    """Place of the document index (int32 [num_entries])."""
    rows: int
    """Place of the sample index (int32 [num_samples + 1, 2])."""
    samples: int
    """Place of the shuffle index (uint32 [num_samples])."""

    def numbers(self) -> tuple[int, ...]:
        """Return this dataset's row of the array `numbers` that the kernel `fill_datasets`
        takes."""
        # The kernel reads them by their address
        assert self.lengths.flags.c_contiguous
        assert self.lengths.dtype == np.int32
        # Entries, and samples, that are shuffled together, before a separate final epoch
        first_entries = self.num_entries
        first_samples = self.num_samples
        if self.samples_before_final is not None:
            first_entries -= len(self.lengths)
            first_samples = self.samples_before_final
        return (
            self.lengths.ctypes.data,
            len(self.lengths),
            self.begin,
            self.num_entries,
            first_entries,
            self.num_samples,
            first_samples,
            self.documents,
            self.rows,
            self.samples,
        )


def fill_small_datasets(
    datasets: Sequence[SmallDataset], memory: Int32s, *, seed: int, length: int, extra: int
) -> None:
    """Compute the document, sample and shuffle index of each dataset. They are the same as the
    results of document_index, sample_rows and shuffle_index, called in this order with one
    generator.

    Args:
        memory: int32 [m], the buffer into which the indices of all datasets are written.
        seed: seed of each dataset's generator.
        length: number of tokens from the start of a sample to the start of the next.
        extra: add_extra_token_to_sequence, 0 or 1.

    Raises: PlanError, as sample_rows does.
    """
    generator = Generator(seed)
    numbers = np.array([dataset.numbers() for dataset in datasets], np.int64)
    filled = np.empty(len(datasets), np.int64)
    fill_datasets(
        numbers, generator.key, generator.position, length, extra, SHORT, _NEAR, memory, filled
    )
    # A sample index has one row more than there are samples
    num_samples = numbers[:, 5]
    for i in np.flatnonzero(filled <= num_samples).tolist():
        _fill_end(datasets[i], int(filled[i]), extra, memory)


def _fill_end(dataset: SmallDataset, filled: int, extra: int, memory: Int32s) -> None:
    """Fill the last rows of a sample index, from row `filled` on: those of samples that begin or
    end after the last document.
    Raises: PlanError, as sample_rows does."""
    rows = memory[dataset.rows : dataset.rows + 2 * (dataset.num_samples + 1)].reshape(-1, 2)
    last = int(dataset.lengths[memory[dataset.documents + dataset.num_entries - 1] - dataset.begin])
    rows[filled:] = end_row(
        last,
        dataset.num_entries,
        filled,
        dataset.num_samples,
        extra=extra,
        keep_tail=dataset.keep_tail,
    )
