"""Estimate the sizes of blocks (tokens, memory, dictionaries) from the tables of the index, and
divide the memory limit of a process.

Nothing is read from data files. `memory` limits what a process uses to read a split. The actual
sizes of its batches and of the order of the sources' blocks are subtracted from `memory` first. If
a source has extra columns, 1 / EXTRA_PART of `memory` is reserved for them. The rest is divided in
proportion to SHARES.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megablend.arrays import Bools, Int64s
from megablend.formats.base import Array
from megablend.formats.parquet.decoding.values import is_by_dictionary
from megablend.index.blocks.extra_columns import ExtraColumn
from megablend.index.read.snapshot import Snapshot
from megablend.lazy import cached_property

EXTRA_PART = 16
"""1 / EXTRA_PART of `memory` is used to cache decoded pages of extra columns, since several blocks
of tokens may need the same page."""
SHARES = {"dictionaries": 1, "planning": 1, "cache": 1, "reads": 2, "blocks": 11}
"""Relative shares of the rest of `memory`, by purpose; see `prefetch.memory_budget.Budget`."""
NUM_SHARES = sum(SHARES.values())
BLOCK_OVERHEAD_BYTES = 1 << 10
"""Memory of the Python objects around a decoded block, and of its table entries."""
STORED_BYTES = 4
"""Smallest size in bytes of a value in a Parquet dictionary."""


class BlockSizes:
    """Computes the sizes of the blocks of an index.

    Attributes:
        snapshot: the opened index.
        append_eod: for each column of the snapshot, the end-of-document token; None for sources
            without an end-of-document token, and for extra columns.
        extra: the extra columns that are read with the tokens, by source name.
    """

    snapshot: Snapshot
    append_eod: tuple[int | None, ...]
    extra: Mapping[str, tuple[ExtraColumn, ...]]

    def num_tokens(self, ids: Int64s) -> Int64s:
        """Return the number of tokens of each block, including end-of-document tokens.

        Args:
            ids: int64 [n], block numbers.

        Returns: int64 [n].
        """
        return self._with_eod(ids, self.snapshot.blocks(ids))

    def _with_eod(self, ids: Int64s, rows: Array) -> Int64s:
        """Return the number of tokens of each block, including end-of-document tokens, given the
        blocks' rows of the block table (int64 [n])."""
        has_eod = self._has_eod[self.snapshot.file_of(ids)]
        return rows["tokens"] + np.where(has_eod, rows["ends"], 0)

    def memory_bytes(self, ids: Int64s, rows: Array, *, documents: bool) -> tuple[Int64s, Int64s]:
        """Estimate the memory of blocks in bytes.

        Args:
            ids: int64 [n], block numbers.
            rows: PLACED_BLOCK_DTYPE [n], the blocks' rows of the block table.
            documents: whether document offsets of decoded blocks are also kept.

        Returns: the memory of each decoded block, int64 [n]; and the additional memory while the
            block is read and decoded, int64 [n].
        """
        files = self.snapshot.file_of(ids)
        token_bytes = self.snapshot.files.token_bytes[files]
        num_tokens = self._with_eod(ids, rows)
        # Tokens may be a view of the whole decoded page, including its repetition and definition
        # levels
        kept = np.maximum(num_tokens * token_bytes, rows["decoded_bytes"]) + BLOCK_OVERHEAD_BYTES
        if self.extra:
            kept += num_tokens * self._extra_sizes[files]
        pieces = 8 * (np.maximum(rows["rows"], 0) + 2)
        reading = rows["stored_bytes"] + kept + pieces
        # Tokens that are narrower than the values of a dictionary are looked up in the wider type
        # first, and then converted
        is_widened = is_by_dictionary(rows["encoding"]) & (token_bytes < STORED_BYTES)
        reading += np.where(is_widened, num_tokens * STORED_BYTES, 0)
        return (kept + pieces if documents else kept), reading

    def dictionaries(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return two arrays int64 [n]: the number of the column chunk that contains each block; and
        the stored size in bytes of the dictionary that the block needs, or 0 if it needs none."""
        numbers, sizes = self.snapshot.chunks_of(ids, "dictionary_bytes")
        needed = is_by_dictionary(self.snapshot.blocks(ids)["encoding"])
        return numbers, np.where(needed, sizes, 0).astype(np.int64)

    @cached_property
    def _has_eod(self) -> Bools:
        """Return whether the documents of each file get end-of-document tokens: bool
        [num_files]."""
        return np.array([eod is not None for eod in self.append_eod])[self.snapshot.files.columns]

    @cached_property
    def _extra_sizes(self) -> Int64s:
        """Bytes per token of all extra columns of each file: int64 [num_files]."""
        sizes = np.zeros(len(self.append_eod), np.int64)  # 0 for extra columns
        for name, columns in self.extra.items():
            number = self.snapshot.sources.numbers[name]
            sizes[number] = sum(column.dtype.itemsize for column in columns)
        return sizes[self.snapshot.files.columns]
