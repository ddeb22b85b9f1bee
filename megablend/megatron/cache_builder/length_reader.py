"""Reads the lengths of a request's datasets; keeps those of small datasets that this rank counts, if memory allows."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from megablend.formats.base import Array
from megablend.megatron.cache_builder.lengths import PartSize, StoredLengths, counted_lengths, lengths_of, part_sizes
from megablend.megatron.request.request import CacheRequest
from megablend.megatron.request.split import sequence_range
from megablend.storage.base import Storage

_BLOCK = 1 << 20
"""Lengths that memory is allocated for at once, 4 MiB: the system provides so much in large pages."""
_MOST_KEPT = 1 << 16
"""Lengths of the largest dataset that are kept: to read more of them again from the page cache takes less than new memory."""


class LengthReader:
    """One rank's access to lengths, from any thread.

    Args:
        keep_bytes: of memory for lengths that were counted.
    """

    def __init__(self, request: CacheRequest, storage: Storage, *, keep_bytes: int) -> None:
        self._tables, self._storage = request.lengths_at, storage
        self._kept: dict[str, StoredLengths] = {}
        self._free = keep_bytes // 4
        self._block = np.empty(0, np.int32)
        self._lock = threading.Lock()

    def count(self, prefix: str, spans: Sequence[tuple[float, float]]) -> list[PartSize]:
        """Count parts of a dataset. Raises: DataError where its files are missing or damaged."""
        stored = lengths_of(prefix, self._tables.get(prefix), storage=self._storage)
        whole = min(begin for begin, _ in spans), max(end for _, end in spans)
        size = stored.num_sequences
        keeps = size <= _MOST_KEPT and sequence_range(whole, size) == (0, size)
        memory = self._allocate(size) if keeps else None
        if memory is None:
            return part_sizes(stored, spans)
        kept = stored.keep_in(memory)
        sizes = part_sizes(kept, spans)
        self._kept[prefix] = kept  # they are not damaged
        return sizes

    def find(self, prefix: str, size: PartSize) -> StoredLengths:
        """The lengths of a dataset whose part has been counted, by this rank or another."""
        kept = self._kept.get(prefix)
        return kept or counted_lengths(prefix, size, self._tables.get(prefix), storage=self._storage)

    def _allocate(self, size: int) -> Array | None:
        """Memory for so many lengths; None where no more may be kept."""
        with self._lock:
            if size > len(self._block):
                fresh = max(size, min(_BLOCK, self._free))
                if fresh > self._free:
                    return None
                self._free -= fresh
                self._block = np.empty(fresh, np.int32)
            memory, self._block = self._block[:size], self._block[size:]
            return memory
