"""Merging the fragments of all files, in source and file order, into one snapshot, and committing it by a rename."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megablend.caches.base import GENERATIONS, CacheStore
from megablend.errors import CacheError
from megablend.formats.base import BLOCK_DTYPE, CHUNK_DTYPE
from megablend.formats.blocks import join_tables
from megablend.fs.atomic_write import (
    checksum,
    temp_sibling,
    translate_os_errors,
    write_flushed,
)
from megablend.index.cache_folders import generations
from megablend.index.checked_table import write_checks
from megablend.index.file_versions import number_of, seen_bytes
from megablend.index.list_snapshots import build_sequence
from megablend.index.manifest import (
    BLOCKS,
    CHUNKS,
    FILES,
    FORMAT_VERSION,
    MANIFEST,
    ROOTS,
    SEEN,
    TABLES,
    TOKEN_RANGES,
    damaged_tables,
    dump_with_checksum,
    read_generation_manifest,
)
from megablend.index.packs import FileFacts
from megablend.index.source_spec import SourceColumn, SourceFile
from megablend.index.tables import BLOCK_COLUMNS, CHUNK_COLUMNS, FILE_SCHEMA, TableWriter, write_batch
from megablend.index.token_ranges import pack_ranges

_Batch = list[tuple[SourceFile, FileFacts]]
Int64s = npt.NDArray[np.int64]
_BATCH_FILES, _BATCH_BLOCKS = 1 << 12, 1 << 16
"""Files per batch of writing tables, or blocks, whichever is reached first."""
_CONTENT = ("digest", "sources", "values", "num_files", "num_blocks", "num_chunks")
"""Fields of a manifest that define the content: without the version that wrote it, and the tables' bytes, which depend on it."""


def write_generation(
    store: CacheStore,
    columns: Sequence[SourceColumn],
    facts: Iterator[FileFacts],
    found_columns: Mapping[str, str | None],
) -> tuple[str, bool]:
    """Merge the indexing results of all files into a snapshot and commit it.

    Only a batch of files is in memory at a time; all tables except the table of files are written batch by batch.

    Args:
        columns: all columns to index, in order.
        facts: indexing result of each file of each column, in order.
        found_columns: for each column (by its name) its name in the files, if known once all facts are consumed; stored with the
            roots.

    Returns: the snapshot's digest, and whether it is new.
    Raises: CacheError if the cache cannot be written; as `facts` does.
    """
    folder = temp_sibling(generations(store.folder) / "generation")
    with translate_os_errors(folder):
        folder.mkdir()
        try:
            ranges: list[tuple[int, int] | None] = []
            manifest = _write_tables(folder, columns, _collect_ranges(facts, ranges))
            write_flushed(folder / MANIFEST, [dump_with_checksum(manifest)])
            found = {
                "roots": {each.name: each.source.root for each in columns},
                "columns": dict(found_columns),
                "skipped": {each.name: each.source.skipped for each in columns if each.source.skipped},
            }
            seen = np.array([number_of(file.etag) for each in columns for file in each.source.files], np.uint64)
            digest = manifest["digest"]
            sequence = 1 + max((build_sequence(store, each) for each in store.list_folders(GENERATIONS)), default=0)
            replaced = {
                SEEN: seen_bytes(digest, seen),
                TOKEN_RANGES: pack_ranges(digest, ranges),
                ROOTS: dump_with_checksum({"arrival": sequence, **found}),
            }
            return digest, store.commit_folder(GENERATIONS, digest, folder, replaced, _is_intact)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _collect_ranges(facts: Iterator[FileFacts], ranges: list[tuple[int, int] | None]) -> Iterator[FileFacts]:
    """Pass the facts through, appending their token ranges to `ranges`."""
    for each in facts:
        ranges.append(each.token_range)
        yield each


def _write_tables(folder: Path, indexed: Sequence[SourceColumn], facts: Iterator[FileFacts]) -> dict[str, Any]:
    """Write the three tables; returns the manifest."""
    totals = _Totals()
    files: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    with TableWriter(folder / BLOCKS, BLOCK_COLUMNS) as blocks, TableWriter(folder / CHUNKS, CHUNK_COLUMNS) as chunks:
        for number, column in enumerate(indexed):
            first_file = len(files)
            for batch in _batches(column.source.files, facts):
                first_chunks = totals.chunk_numbers(batch)
                chunks.append(_chunk_columns(batch, len(files)))
                first_blocks, columns = totals.block_columns(batch, first_chunks, documents=column.read.count_documents)
                blocks.append(columns)
                firsts = zip(first_blocks.tolist(), first_chunks.tolist(), strict=True)
                files += [_file_row(number, *each, *first) for each, first in zip(batch, firsts, strict=True)]
            extra = {"extra_of": column.source.spec.name} if column.is_extra else {}
            sources.append(
                {
                    **extra,
                    **column.read.record(),
                    "name": column.name,
                    "first_file": first_file,
                    "num_files": len(column.source.files),
                    "rows": sum(file["rows"] for file in files[first_file:]),
                }
            )
        blocks.append(totals.last_row())
        values = {BLOCKS: blocks.finish(), CHUNKS: chunks.finish()}
    table = [pa.array([file[name] for file in files], FILE_SCHEMA.field(name).type) for name in FILE_SCHEMA.names]
    write_batch(folder / FILES, pa.RecordBatch.from_arrays(table, schema=FILE_SCHEMA))
    content = {"format_version": FORMAT_VERSION, "sources": sources, "values": values}
    return {
        **content,
        "digest": _digest({**content, "files": files}),
        "written_by": f"megablend {_version()}",
        "num_files": len(files),
        "num_blocks": totals.blocks,
        "num_chunks": totals.chunks,
        "tables": {
            **{name: {"bytes": (folder / name).stat().st_size, "blake2b": checksum(folder / name)} for name in TABLES},
            **write_checks(folder, folder),
        },
    }


class _Totals:
    """Running counts over the snapshot."""

    def __init__(self) -> None:
        self.blocks = self.chunks = self.tokens = self.rows = self.ends = 0

    def chunk_numbers(self, batch: _Batch) -> Int64s:
        """Number of each file's first chunk, int64 [num_files]; advances the count."""
        counts = np.array([len(facts.chunks) for _, facts in batch], np.int64)
        firsts: Int64s = self.chunks + np.cumsum(counts) - counts
        self.chunks += int(counts.sum())
        return firsts

    def block_columns(
        self, batch: _Batch, first_chunks: Int64s, *, documents: bool
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
        columns = _columns(blocks)
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
        row = _columns(np.zeros(1, BLOCK_DTYPE))
        for name, total in (("tokens", self.tokens), ("rows", self.rows), ("ends", self.ends)):
            row[f"{name}_before"] = np.array([total])
        return row


def _batches(files: Sequence[SourceFile], facts: Iterator[FileFacts]) -> Iterator[_Batch]:
    """The files with their indexing results, in batches."""
    batch: _Batch = []
    num_blocks = 0
    for file in files:
        batch.append((file, next(facts)))
        num_blocks += len(batch[-1][1].blocks)
        if len(batch) == _BATCH_FILES or num_blocks >= _BATCH_BLOCKS:
            yield batch
            batch, num_blocks = [], 0
    if batch:
        yield batch


def _chunk_columns(batch: _Batch, first_file: int) -> dict[str, npt.NDArray[Any]]:
    """The columns of all chunks of a batch of files, the first of which has number `first_file`."""
    chunks = join_tables((facts.chunks for _, facts in batch), CHUNK_DTYPE)
    files = np.repeat(np.arange(first_file, first_file + len(batch)), [len(facts.chunks) for _, facts in batch])
    return _columns(chunks) | {"file": files}


def _file_row(source: int, file: SourceFile, facts: FileFacts, first_block: int, first_chunk: int) -> dict[str, Any]:
    return {
        "source": source,
        "name": file.name,
        "size": file.size,
        "rows": facts.rows,
        "tokens": facts.tokens,
        "token_dtype": facts.token_dtype,
        "first_block": first_block,
        "first_chunk": first_chunk,
        "structure": facts.structure,
        "body": facts.body,
        "meta": facts.meta,
    }


def _columns(rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {name: rows[name] for name in rows.dtype.names or ()}


def _is_intact(final: Path, written: Path) -> bool:
    """Whether the snapshot committed before has the same content as the one just written, and its tables are undamaged."""
    try:
        manifest, expected = read_generation_manifest(final), read_generation_manifest(written)
        return all(manifest.get(name) == expected[name] for name in _CONTENT) and not damaged_tables(final, manifest)
    except CacheError:
        return False


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _version() -> str:
    try:
        return metadata.version("megablend")
    except metadata.PackageNotFoundError:
        return "(not installed)"
