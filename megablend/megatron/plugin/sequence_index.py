"""The `index` of a low-level dataset, as megatron.core's IndexedDataset has one: where each sequence and each document begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from megablend.formats.base import Array
from megablend.lazy import cached_property


class SequenceIndex:
    """Lengths, places and documents of sequences. Nothing but lengths is read before it is asked for.

    Args:
        sequence_lengths: int32 [num_sequences], tokens.
        dtype: of a token.
        read_pointers: int64 [num_sequences], bytes from the start of the data to each sequence.
        read_documents: int64 [num_documents + 1], the first sequence of each document, and the number of sequences.

    Source: megatron.core.datasets.indexed_dataset._IndexReader.
    """

    sequence_modes = None
    """Used for multimodal data only."""

    def __init__(
        self,
        sequence_lengths: Array,
        dtype: np.dtype[Any],
        read_pointers: Callable[[], Array],
        read_documents: Callable[[], Array],
    ) -> None:
        self.sequence_lengths = sequence_lengths
        self.dtype = dtype.type
        self.dtype_size = dtype.itemsize
        self._read_pointers, self._read_documents = read_pointers, read_documents

    @cached_property
    def sequence_pointers(self) -> Array:
        """int64 [num_sequences], bytes."""
        return self._read_pointers()

    @cached_property
    def document_indices(self) -> Array:
        """int64 [num_documents + 1], sequences."""
        return self._read_documents()

    @property
    def sequence_count(self) -> int:
        """Number of sequences."""
        return len(self)

    @property
    def document_count(self) -> int:
        """Entries of `document_indices`: one more than there are documents."""
        return len(self.document_indices)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int) -> tuple[np.int64, np.int32, None]:
        """Place, length and mode of a sequence. Raises: IndexError."""
        return self.sequence_pointers[idx], self.sequence_lengths[idx], None
