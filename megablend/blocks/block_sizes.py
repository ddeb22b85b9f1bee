"""Sizes of blocks from the tables of the index: tokens, memory, dictionaries. Nothing is read from data files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megablend.blocks.extra_columns import ExtraColumn
from megablend.formats.base import Array
from megablend.formats.parquet.decoding.values import is_by_dictionary
from megablend.index.snapshot import Snapshot
from megablend.lazy import cached_property

BLOCK_OVERHEAD_BYTES = 1 << 10
"""Memory of the Python objects around a decoded block, and of its table entries."""

STORED_BYTES = 4
"""Of the values of a Parquet dictionary, at least."""


class _ByFile(NamedTuple):
    """Properties of each file of the index."""

    has_eod: npt.NDArray[np.bool_]
    """bool [num_files]"""
    token_bytes: npt.NDArray[np.int64]
    """int64 [num_files]"""
    extra_bytes: npt.NDArray[np.int64]
    """int64 [num_files]: bytes of all extra columns per token."""


class BlockSizes:
    """Sizes of the blocks of an index.

    Attributes:
        snapshot: the opened index.
        column_eods: for each of its columns, the end-of-document token; None for sources without one, and extra columns.
        extra: by source name, the columns that are read with the tokens.
    """

    snapshot: Snapshot
    column_eods: tuple[int | None, ...]
    extra: Mapping[str, tuple[ExtraColumn, ...]]

    def num_tokens(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of tokens of blocks `ids` int64 [n], including end-of-document tokens: int64 [n]."""
        return self._with_eod(ids, self.snapshot.blocks(ids))

    def _with_eod(self, ids: npt.NDArray[np.int64], rows: Array) -> npt.NDArray[np.int64]:
        """Number of tokens of blocks `ids`, from their rows of the block table: int64 [n]."""
        has_eod = self._by_file.has_eod[self.snapshot.file_of(ids)]
        return rows["tokens"] + np.where(has_eod, rows["ends"], 0)

    def memory_bytes(
        self, ids: npt.NDArray[np.int64], rows: Array, *, documents: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Estimated bytes of blocks `ids` int64 [n]: decoded, and in addition while being read and decoded. int64 [n] each.

        Args:
            rows: PLACED_BLOCK_DTYPE [n], their rows of the block table.
            documents: document offsets of a block are kept, too.
        """
        files = self.snapshot.file_of(ids)
        num_tokens = self._with_eod(ids, rows)
        # Tokens may be a view of the decoded page, levels and all.
        kept = np.maximum(num_tokens * self._by_file.token_bytes[files], rows["decoded_bytes"]) + BLOCK_OVERHEAD_BYTES
        kept += num_tokens * self._by_file.extra_bytes[files]
        pieces = 8 * (np.maximum(rows["rows"], 0) + 2)
        reading = rows["stored_bytes"] + kept + pieces
        # Narrow tokens of a dictionary are looked up in the type in which it is stored, and then converted.
        is_widened = is_by_dictionary(rows["encoding"]) & (self._by_file.token_bytes[files] < STORED_BYTES)
        reading += np.where(is_widened, num_tokens * STORED_BYTES, 0)
        return (kept + pieces if documents else kept), reading

    def dictionaries(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Dictionaries that blocks `ids` int64 [n] refer to: numbers, and stored sizes in bytes (0: none). int64 [n] each."""
        numbers, sizes = self.snapshot.chunks_of(ids, "dictionary_bytes")
        needed = is_by_dictionary(self.snapshot.blocks(ids)["encoding"])
        return numbers, np.where(needed, sizes, 0).astype(np.int64)

    @cached_property
    def _by_file(self) -> _ByFile:
        eods = np.array([eod is not None for eod in self.column_eods], np.bool_)
        names = self.snapshot.sources.names
        sizes = [sum(each.dtype.itemsize for each in self.extra.get(name, ())) for name in names]
        sizes += [0] * (len(eods) - len(sizes))  # extra columns
        extra = np.array(sizes, np.int64)[self.snapshot.file_columns]
        return _ByFile(eods[self.snapshot.file_columns], self.snapshot.file_token_bytes, extra)
