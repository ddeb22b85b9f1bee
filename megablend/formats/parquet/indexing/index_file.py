"""A Parquet file's blocks: its data pages, chunk by chunk."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.arrays import Int64s
from megablend.config.read_spec import ReadSpec
from megablend.formats.base import CHUNK_DTYPE, Array, FileIndex
from megablend.formats.parquet.decoding.codecs import CODECS, unsupported_codec_message
from megablend.formats.parquet.indexing.chunk_pages import ChunkPages, PageScanContext
from megablend.formats.parquet.indexing.chunks import find_pages
from megablend.formats.parquet.indexing.count import blocks_of
from megablend.formats.parquet.metadata.checks import refuse
from megablend.formats.parquet.metadata.column_chunk import Chunks, column_chunks
from megablend.formats.parquet.metadata.footer import read_footer
from megablend.formats.parquet.metadata.names import Physical
from megablend.formats.parquet.metadata.schema import Column, find_column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import UnsupportedError
from megablend.storage.base import Storage

_WORDS = {
    (Physical.INT32, False): "<i4",
    (Physical.INT32, True): "<u4",
    (Physical.INT64, False): "<i8",
}
"""How statistics are stored: (physical type, unsigned) -> dtype. No token column is an unsigned
INT64."""


def find_value_range(chunks: Chunks, column: Column) -> tuple[int, int] | None:
    """The smallest and the largest value of the chunks that have statistics; None if none has.

    Args:
        chunks: CHUNK_DTYPE [n].
    """
    is_unsigned = column.dtype.startswith("u")
    dtype = np.dtype(_WORDS.get((Physical(column.physical), is_unsigned), "V0"))
    if not dtype.itemsize:
        return None
    newer = _has_fields(chunks, (5, 6), dtype.itemsize) & (
        chunks["ranges"] & (1 << 7 | 1 << 8) == 0
    )
    older = _has_fields(chunks, (1, 2), dtype.itemsize) & (not is_unsigned) & ~newer
    lows, highs = (
        np.concatenate([chunks[new][newer], chunks[old][older]])
        .astype(f"<u{dtype.itemsize}")
        .view(dtype)
        for new, old in (("min_value", "old_min"), ("max_value", "old_max"))
    )
    sound = lows <= highs
    return (int(lows[sound].min()), int(highs[sound].max())) if sound.any() else None


def _has_fields(chunks: Chunks, fields: tuple[int, int], width: int) -> npt.NDArray[np.bool_]:
    """Which chunks have both fields of Statistics, of `width` bytes: bool [n]."""
    bits = sum(1 << (field if width == 4 else field + 8) for field in fields)
    has: npt.NDArray[np.bool_] = chunks["ranges"] & bits == bits
    return has


def index_file(
    path: str,
    read: ReadSpec,
    storage: Storage,
    *,
    span: tuple[int, int] | None = None,
    threaded_bytes: int = 64 << 20,
) -> FileIndex:
    """Find and count the pages of a file's column, or of its chunks that begin within bytes `span`.

    If tokens are known without a scan, but rows are not, and documents need not be counted, rows
    and ends of blocks are -1.

    Args:
        threaded_bytes: smaller columns are indexed faster without threads.

    Raises: MissingFileError, CorruptFileError, UnsupportedFileError, ConfigError (no such column).
    """
    source = FileBytes(path, storage, storage.stat(path).size)
    footer = read_footer(source)
    with source.error_context(footer.offset, "the footer"):
        leaf, num_leaves = find_column(footer.schema, read.column, path, numbers=read.allow_float)
        chunks = column_chunks(footer, leaf, num_leaves)
        _check_chunks(chunks, leaf)
    first_rows = np.cumsum(chunks["num_rows"]) - chunks["num_rows"]
    if span is not None:
        begins = np.where(chunks["num_values"] > 0, chunks["start"], 0)
        chunks = chunks[(span[0] <= begins) & (begins < span[1])]
    large = chunks["stored_bytes"].sum() >= threaded_bytes
    found = find_pages(
        PageScanContext(
            source=source,
            column=leaf,
            limit=footer.offset,
            documents=read.count_documents,
            in_flight=source.limits.max_reads if large and not source.is_prefetched else 1,
        ),
        chunks,
    )
    blocks, first_tokens = blocks_of(found.pages, found.first_page)
    return FileIndex(
        rows=int(chunks["num_rows"].sum()),
        tokens=int(first_tokens[-1]),
        token_dtype=leaf.dtype,
        chunks=_chunk_table(chunks, found, first_tokens, first_rows),
        blocks=blocks,
        structure=footer.digest,
        meta=leaf.to_meta(),
        scanned_bytes=found.scanned_bytes,
        column=leaf.name,
        note=found.note,
        token_range=find_value_range(chunks, leaf),
    )


def _check_chunks(chunks: Chunks, column: Column) -> None:
    """Raises MalformedError, UnsupportedError."""
    refuse(
        chunks["physical"] != column.physical,
        lambda i: f"row group {i} has a different column in place of {column.name!r}",
    )
    codecs = chunks["codec"].tolist()
    for codec in set(codecs) - CODECS.keys():
        raise UnsupportedError(
            f"row group {codecs.index(codec)}: {unsupported_codec_message(codec)}"
        )
    if column.max_rep == 0:
        rows = chunks["num_rows"]
        values = chunks["num_values"]
        refuse(values != rows, lambda i: f"row group {i} has {values[i]} values for {rows[i]} rows")


def _chunk_table(
    chunks: Chunks, found: ChunkPages, first_tokens: Int64s, first_rows: Int64s
) -> Array:
    table = np.zeros(len(chunks), CHUNK_DTYPE)
    table["row_group"] = chunks["row_group"]
    table["codec"] = chunks["codec"]
    table["dictionary_offset"], table["dictionary_bytes"] = found.dictionaries.T
    table["first_row"] = first_rows[chunks["row_group"]]
    table["first_token"] = first_tokens[:-1]
    return table
