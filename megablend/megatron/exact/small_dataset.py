"""The three indices of small datasets, those of many computed by one kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megablend.arrays import Int32s
from megablend.kernels.exact.small_dataset import fill_datasets
from megablend.megatron.exact.samples import FAR, SHORT, end_row
from megablend.megatron.exact.shuffle import Generator

MAX_DOCUMENTS = 1 << 20
"""The most documents per epoch."""
_NEAR = FAR // 4
"""So many documents' lengths fit in a core's own caches."""


class SmallDataset(NamedTuple):
    """A dataset, and where its indices are in memory, in units of 4 bytes."""

    lengths: Int32s
    """int32 [n], contiguous, tokens of documents `begin` to `begin` + n; n is 1 to
    MAX_DOCUMENTS."""
    begin: int
    num_entries: int
    """Entries of the document index: epochs * n."""
    num_samples: int
    samples_before_final: int | None
    """Samples of all epochs but the last, if the last one is shuffled separately; otherwise None.
    At most num_samples."""
    keep_tail: bool
    """Whether samples may end after the documents."""
    documents: int
    """Where its document index begins: int32 [num_entries]."""
    rows: int
    """Where its sample index begins: int32 [num_samples + 1, 2]."""
    samples: int
    """Where its shuffle index begins: uint32 [num_samples]."""

    def numbers(self) -> tuple[int, ...]:
        """A row of `numbers`, as `fill_datasets` takes them."""
        assert self.lengths.flags.c_contiguous  # they are read by their address
        assert self.lengths.dtype == np.int32
        together = self.num_entries
        first = self.num_samples
        if self.samples_before_final is not None:
            together -= len(self.lengths)
            first = self.samples_before_final
        lengths = (self.lengths.ctypes.data, len(self.lengths), self.begin)
        return (*lengths, self.num_entries, together, self.num_samples, first, *self[-3:])


def fill_small_datasets(
    datasets: Sequence[SmallDataset], memory: Int32s, *, seed: int, length: int, extra: int
) -> None:
    """Compute for each dataset what document_index,
    sample_rows and shuffle_index return when they are called one after another.

    Args:
        length: tokens from one sample's start to the next one's.
        extra: add_extra_token_to_sequence, 0 or 1.
        memory: int32 [m], which contains the indices of all datasets, filled.

    Raises: PlanError as sample_rows does.
    """
    generator = Generator(seed)
    numbers = np.array([dataset.numbers() for dataset in datasets], np.int64)
    filled = np.empty(len(datasets), np.int64)
    fill_datasets(
        numbers, generator.key, generator.position, length, extra, SHORT, _NEAR, memory, filled
    )
    for i in np.flatnonzero(filled <= numbers[:, 5]).tolist():
        _fill_end(datasets[i], int(filled[i]), extra, memory)


def _fill_end(dataset: SmallDataset, filled: int, extra: int, memory: Int32s) -> None:
    """Fill the rows of the samples that are after the documents.
    Raises: PlanError as sample_rows does."""
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
