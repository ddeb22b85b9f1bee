"""Write the tables of a snapshot from the indexing results of its files, one batch of files at a
time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.arrays import Int64s
from megablend.formats.base import BLOCK_DTYPE, CHUNK_DTYPE
from megablend.formats.blocks import join_tables
from megablend.index.build.fragments import Fragment
from megablend.index.build.source_spec import SourceFile, SourceSpec
from megablend.index.tables.manifest import BLOCKS, CHUNKS, FILES, FORMAT_VERSION
from megablend.index.tables.row_checks import write_snapshot_checks
from megablend.index.tables.table_folder import describe_tables
from megablend.index.tables.tables import (
    BLOCK_COLUMNS,
    CHUNK_COLUMNS,
    FILE_SCHEMA,
    TableWriter,
    write_batch,
)
from megablend.system.digest import digest_json

FileBatch = list[tuple[SourceFile, Fragment]]
"""A batch of files whose indexing results are merged together."""
_BATCH_FILES = 1 << 12
_BATCH_BLOCKS = 1 << 16
"""A batch is complete when it has _BATCH_FILES files or _BATCH_BLOCKS blocks."""


class RunningTotals:
    """Counts the blocks, chunks, tokens, rows and document ends that have been written to a
    snapshot."""

    def __init__(self) -> None:
        self.blocks = self.chunks = 0
        self._counts = dict.fromkeys(("tokens", "rows", "ends"), 0)

    def chunk_numbers(self, batch: FileBatch) -> Int64s:
        """Return the number of each file's first chunk (int64 [num_files]), and add the batch's
        chunks to the totals."""
        counts = np.array([len(fragment.chunks) for _, fragment in batch], np.int64)
        firsts: Int64s = self.chunks + np.cumsum(counts) - counts
        self.chunks += int(counts.sum())
        return firsts

    def block_columns(
        self, batch: FileBatch, first_chunks: Int64s, *, documents: bool
    ) -> tuple[Int64s, dict[str, npt.NDArray[Any]]]:
        """Return the number of each file's first block (int64 [num_files]), and the columns of all
        blocks of the batch. Add these blocks to the totals.

        Some formats and fragments count documents even if this is not requested. These counts are
        dropped, and so are blocks without tokens, so that a snapshot does not depend on earlier
        contents of the cache.
        """
        blocks = join_tables((fragment.blocks for _, fragment in batch), BLOCK_DTYPE)
        counts = np.array([len(fragment.blocks) for _, fragment in batch], np.int64)
        file_of_block = np.repeat(np.arange(len(batch)), counts)
        if not documents:
            kept = blocks["tokens"] > 0
            blocks = blocks[kept]
            file_of_block = file_of_block[kept]
            blocks["rows"] = blocks["ends"] = blocks["flags"] = 0
            counts = np.bincount(file_of_block, minlength=len(batch))
        first_blocks: Int64s = self.blocks + np.cumsum(counts) - counts
        columns = columns_of_rows(blocks)
        columns["chunk"] = blocks["chunk"] + first_chunks[file_of_block]
        for name, before in self._counts.items():
            columns[f"{name}_before"] = before + np.cumsum(blocks[name]) - blocks[name]
            self._counts[name] += int(blocks[name].sum())
        self.blocks += len(blocks)
        return first_blocks, columns

    def last_row(self) -> dict[str, Any]:
        """Return the row that follows the last block: the totals, and zeros in all other
        columns."""
        row = columns_of_rows(np.zeros(1, BLOCK_DTYPE))
        for name, total in self._counts.items():
            row[f"{name}_before"] = np.array([total])
        return row


def columns_of_rows(rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the fields of a structured array, by name."""
    return {name: rows[name] for name in rows.dtype.names or ()}


def write_tables(
    folder: Path, indexed: Sequence[SourceSpec], fragments: Iterator[Fragment]
) -> dict[str, Any]:
    """Write the tables of a snapshot, and their checksums, to an empty folder. Return the
    manifest."""
    totals = RunningTotals()
    files: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    with (
        TableWriter(folder / BLOCKS, BLOCK_COLUMNS) as blocks,
        TableWriter(folder / CHUNKS, CHUNK_COLUMNS) as chunks,
    ):
        for number, column in enumerate(indexed):
            first_file = len(files)
            for batch in _batches(column.files, fragments):
                first_chunks = totals.chunk_numbers(batch)
                chunks.append(_chunk_columns(batch, len(files)))
                first_blocks, columns = totals.block_columns(
                    batch, first_chunks, documents=column.read.count_documents
                )
                blocks.append(columns)
                files += [
                    _file_row(number, file, fragment, first_block, first_chunk)
                    for (file, fragment), first_block, first_chunk in zip(
                        batch, first_blocks.tolist(), first_chunks.tolist(), strict=True
                    )
                ]
            num_rows = sum(file["rows"] for file in files[first_file:])
            sources.append(_source_record(column, first_file, num_rows))
        blocks.append(totals.last_row())
        values = {BLOCKS: blocks.finish(), CHUNKS: chunks.finish()}
    write_batch(folder / FILES, pa.RecordBatch.from_pylist(files, schema=FILE_SCHEMA))
    write_snapshot_checks(folder, folder)
    content = {"format_version": FORMAT_VERSION, "sources": sources, "values": values}
    return {
        **content,
        "digest": digest_json({**content, "files": files}),
        "written_by": f"megablend {_version()}",
        "num_files": len(files),
        "num_blocks": totals.blocks,
        "num_chunks": totals.chunks,
        "tables": describe_tables(folder),
    }


def _batches(files: Sequence[SourceFile], fragments: Iterator[Fragment]) -> Iterator[FileBatch]:
    """Yield the files with their indexing results, in batches."""
    batch: FileBatch = []
    num_blocks = 0
    for file in files:
        batch.append((file, next(fragments)))
        num_blocks += len(batch[-1][1].blocks)
        if len(batch) == _BATCH_FILES or num_blocks >= _BATCH_BLOCKS:
            yield batch
            batch = []
            num_blocks = 0
    if batch:
        yield batch


def _chunk_columns(batch: FileBatch, first_file: int) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of the chunk table for a batch of files. `first_file` is the number of the
    first file."""
    chunks = join_tables((fragment.chunks for _, fragment in batch), CHUNK_DTYPE)
    files = np.repeat(
        np.arange(first_file, first_file + len(batch)),
        [len(fragment.chunks) for _, fragment in batch],
    )
    return columns_of_rows(chunks) | {"file": files}


def _source_record(column: SourceSpec, first_file: int, num_rows: int) -> dict[str, Any]:
    """Return the record of a column in the manifest."""
    return {
        **({"extra_of": column.name} if column.is_extra else {}),
        **column.read.record(),
        "name": column.column_name,
        "first_file": first_file,
        "num_files": len(column.files),
        "rows": num_rows,
    }


def _file_row(
    source: int, file: SourceFile, fragment: Fragment, first_block: int, first_chunk: int
) -> dict[str, Any]:
    return {
        "source": source,
        "name": file.name,
        "size": file.size,
        "rows": fragment.rows,
        "tokens": fragment.tokens,
        "token_dtype": fragment.token_dtype,
        "first_block": first_block,
        "first_chunk": first_chunk,
        "structure": fragment.structure,
        "body": fragment.body,
        "meta": fragment.meta,
    }


@cache
def _version() -> str:
    try:
        return metadata.version("megablend")
    except metadata.PackageNotFoundError:
        return "(not installed)"
