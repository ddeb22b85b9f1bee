"""Running counts over the blocks of a snapshot, and the columns of its block table that follow from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.formats.base import BLOCK_DTYPE
from megablend.formats.blocks import join_tables
from megablend.index.packs import FileFacts
from megablend.index.source_spec import SourceFile

FileBatch = list[tuple[SourceFile, FileFacts]]
"""Files with their indexing results, merged together."""


class RunningTotals:
    """Running counts over the snapshot."""

    def __init__(self) -> None:
        self.blocks = self.chunks = self.tokens = self.rows = self.ends = 0

    def chunk_numbers(self, batch: FileBatch) -> Int64s:
        """Number of each file's first chunk, int64 [num_files]; advances the count."""
        counts = np.array([len(facts.chunks) for _, facts in batch], np.int64)
        firsts: Int64s = self.chunks + np.cumsum(counts) - counts
        self.chunks += int(counts.sum())
        return firsts

    def block_columns(
        self, batch: FileBatch, first_chunks: Int64s, *, documents: bool
    ) -> tuple[Int64s, dict[str, npt.NDArray[Any]]]:
        """Number of each file's first block, int64 [num_files], and the columns of all their blocks; advances the counts.

        If documents are not requested, some formats and fragments provide them nevertheless. They are dropped, along with blocks
        without tokens, so that a snapshot does not depend on what was in the cache.
        """
        blocks = join_tables((facts.blocks for _, facts in batch), BLOCK_DTYPE)
        counts = np.array([len(facts.blocks) for _, facts in batch], np.int64)
        owners = np.repeat(np.arange(len(batch)), counts)
        if not documents:
            kept = blocks["tokens"] > 0
            blocks, owners = blocks[kept], owners[kept]
            blocks["rows"] = blocks["ends"] = blocks["flags"] = 0
            counts = np.bincount(owners, minlength=len(batch))
        first_blocks: Int64s = self.blocks + np.cumsum(counts) - counts
        columns = columns_of_rows(blocks)
        columns["chunk"] = blocks["chunk"] + first_chunks[owners]
        for name, before in (("tokens", self.tokens), ("rows", self.rows), ("ends", self.ends)):
            columns[f"{name}_before"] = before + np.cumsum(blocks[name]) - blocks[name]
        self.blocks += len(blocks)
        self.tokens += int(blocks["tokens"].sum())
        self.rows += int(blocks["rows"].sum())
        self.ends += int(blocks["ends"].sum())
        return first_blocks, columns

    def last_row(self) -> dict[str, Any]:
        """The row after the last block: the totals, and zeros."""
        row = columns_of_rows(np.zeros(1, BLOCK_DTYPE))
        for name, total in (("tokens", self.tokens), ("rows", self.rows), ("ends", self.ends)):
            row[f"{name}_before"] = np.array([total])
        return row


def columns_of_rows(rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The fields of a structured array, by name."""
    return {name: rows[name] for name in rows.dtype.names or ()}
