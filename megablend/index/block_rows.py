"""Rows of a snapshot's tables of blocks and chunks, and its files; rows of the large tables are verified when they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.errors import DamagedCacheError
from megablend.formats.base import CHUNK_DTYPE, PLACED_BLOCK_DTYPE
from megablend.index.file_table import FileEntry, FileTable
from megablend.index.manifest import BLOCKS, CHUNKS
from megablend.index.row_checks import PLACE, RUNNING, CheckedTable, has_checks, warn_unchecked
from megablend.index.source_entry import ColumnEntry
from megablend.index.tables import CHUNK_COLUMNS
from megablend.lazy import cached_property


class BlockRows:
    """The tables of a snapshot.

    Attributes:
        folder: of the snapshot.
        num_files, num_blocks: of all columns.
        tokens_before, rows_before, ends_before: int64 [num_blocks + 1], running counts over the blocks, memory-mapped and not
            verified; `running`, `count_tokens_before` and `find_blocks` verify what they return.

    Raises: CacheError if they are damaged.
    """

    columns: Sequence[ColumnEntry]

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self._has_checks = has_checks(manifest)
        if not self._has_checks:
            warn_unchecked(folder)
        self._blocks = CheckedTable(folder, BLOCKS, checks=self._has_checks)
        columns = self._blocks.mapped
        self.tokens_before, self.rows_before, self.ends_before = (columns[name] for name in RUNNING)
        self.num_blocks = self._blocks.num_rows - 1
        if self.num_blocks != manifest["num_blocks"]:
            raise DamagedCacheError.of(
                f"{folder / BLOCKS}: damaged table: {self.num_blocks} blocks, {manifest['num_blocks']} were committed"
            )
        self._num_chunks: int = manifest["num_chunks"]
        self._files = FileTable(
            folder,
            num_files=manifest["num_files"],
            num_columns=len(manifest["sources"]),
            num_blocks=self.num_blocks,
            num_chunks=self._num_chunks,
        )
        self.num_files = len(self._files)
        self._first_block, self._first_chunk = self._files.first_block, self._files.first_chunk

    def chunks(self, file: FileEntry) -> npt.NDArray[np.void]:
        """CHUNK_DTYPE [file.num_chunks]: the column chunks of a file; `file` in them is its number."""
        rows = np.arange(file.first_chunk, file.first_chunk + file.num_chunks)
        chunks = np.empty(len(rows), CHUNK_DTYPE)
        for name, values in zip(CHUNK_COLUMNS.names or (), self._chunks.take("row", rows), strict=True):
            chunks[name] = values
        chunks.flags.writeable = False
        return chunks

    def chunks_of(self, ids: npt.ArrayLike, column: str) -> tuple[Int64s, npt.NDArray[Any]]:
        """Column chunks that contain blocks `ids` int64 [n]: their numbers in the index, int64 [n], and values of `column`."""
        numbers = self._blocks.take("place", np.asarray(ids, np.int64))[PLACE.index("chunk")]
        distinct, places = np.unique(numbers, return_inverse=True)
        self._check_chunks(distinct, 0, self._num_chunks)
        return numbers, self._chunks.take("row", distinct)[(CHUNK_COLUMNS.names or ()).index(column)][places]

    def _check_chunks(self, chunks: Int64s, low: int | Int64s, high: int | Int64s) -> None:
        """Refuse numbers of chunks outside [low, high)."""
        if ((chunks < low) | (chunks >= high)).any():
            raise DamagedCacheError.of(
                f"{self.folder / BLOCKS}: damaged table: a block refers to a chunk outside its file"
            )

    @cached_property
    def _chunks(self) -> CheckedTable:
        table = CheckedTable(self.folder, CHUNKS, checks=self._has_checks)
        if table.num_rows != self._num_chunks:
            raise DamagedCacheError.of(
                f"{self.folder / CHUNKS}: damaged table: {table.num_rows} rows, {self._num_chunks} were committed"
            )
        return table

    def file_of(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """File numbers of blocks. int32 [n]."""
        # Files without blocks have the same first block as the next file: the last of these contains the block.
        return (np.searchsorted(self._first_block, np.asarray(ids), side="right") - 1).astype(np.int32)

    def blocks(self, ids: npt.ArrayLike) -> npt.NDArray[np.void]:
        """Rows of the block table, in the form that the files' formats use.

        Args:
            ids: int64 [n], block numbers of the snapshot.

        Returns: PLACED_BLOCK_DTYPE [n]; `chunk` counts the file's own chunks; rows, first_row and ends are -1 where not counted.
        Raises: CacheError if the table is found to be damaged.
        """
        ids = np.asarray(ids, np.int64)
        files = self.file_of(ids)
        rows = np.empty(len(ids), PLACED_BLOCK_DTYPE)
        for name, values in zip(PLACE, self._blocks.take("place", ids), strict=True):
            rows[name] = values
        chunks, first_chunk = rows["chunk"], self._first_chunk[files]
        self._check_chunks(chunks, first_chunk, self._first_chunk[files + 1])
        rows["chunk"] = chunks - first_chunk
        running = self._blocks.take("running", np.concatenate((ids, ids + 1)))
        before, counts = running[:, : len(ids)], running[:, len(ids) :] - running[:, : len(ids)]
        rows["tokens"], counted = counts[0], self._counted[files]
        rows["first_token"] = before[0] - self._first_token[files]
        rows["first_row"] = np.where(counted, before[1] - self._first_row[files], -1)
        for name, values in zip(("rows", "ends"), counts[1:], strict=True):
            rows[name] = np.where(counted, values, -1)
        return rows

    def running(self, name: str, ids: npt.ArrayLike) -> Int64s:
        """One of tokens_before, rows_before and ends_before at `ids` int64 [n], verified: int64 [n]. Raises: CacheError."""
        counts: Int64s = self._blocks.take("running", np.asarray(ids, np.int64))[RUNNING.index(name)]
        return counts

    def count_tokens_before(self, ids: npt.ArrayLike, *, has_eod: bool) -> Int64s:
        """Tokens before blocks `ids` int64 [n], with one end-of-document token per document or without: int64 [n].

        Raises: CacheError.
        """
        counts = self._blocks.take("running", np.asarray(ids, np.int64))
        tokens: Int64s = counts[0] + counts[2] if has_eod else counts[0]
        return tokens

    def find_blocks(self, name: str, span: range, values: Int64s) -> Int64s:
        """The last blocks of `span` before which a running count is at most `values` int64 [n]: int64 [n].

        Args:
            values: at least the count before the span's first block, and less than the count after its last one.

        Raises: CacheError.
        """
        return self._blocks.find_last("running", name, span, values)

    @cached_property
    def _first_token(self) -> Int64s:
        """int64 [num_files + 1]: tokens before each file."""
        return self.running("tokens_before", self._first_block)

    @cached_property
    def _first_row(self) -> Int64s:
        """int64 [num_files + 1]: counted documents before each file."""
        return self.running("rows_before", self._first_block)

    @cached_property
    def _counted(self) -> npt.NDArray[np.bool_]:
        """bool [num_files]: the file's documents were counted."""
        counted = np.zeros(self.num_files, bool)
        for column in self.columns:
            counted[column.files.start : column.files.stop] = column.documents
        return counted
