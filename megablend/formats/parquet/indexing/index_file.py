"""Index a Parquet file: its blocks are its data pages, chunk by chunk."""

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

_STATISTICS_DTYPES = {
    (Physical.INT32, False): "<i4",
    (Physical.INT32, True): "<u4",
    (Physical.INT64, False): "<i8",
}
"""The dtype of statistics for each physical type, signed (False) or unsigned (True). A token column
is never an unsigned INT64."""
_NEW_FIELDS = (5, 6)
"""The ids of `max_value` and `min_value` in Statistics of the Parquet format."""
_OLD_FIELDS = (1, 2)
"""The ids of `max` and `min`, which are deprecated."""
_INEXACT = 1 << 7 | 1 << 8
"""The bits of CHUNK_DTYPE's `ranges` where `is_max_value_exact` or `is_min_value_exact` is false."""


def index_file(
    path: str,
    read: ReadSpec,
    storage: Storage,
    *,
    span: tuple[int, int] | None = None,
    threaded_bytes: int = 64 << 20,
) -> FileIndex:
    """Find and count the pages of a file's column.

    Rows and ends of blocks are -1 if documents need not be counted, and if the tokens are known
    without reading levels, but the rows are not.

    Args:
        span: bytes [start, stop): only chunks that begin within it are indexed; None for all.
        threaded_bytes: columns with fewer bytes are indexed without threads, which is faster.

    Raises: MissingFileError, CorruptFileError, UnsupportedFileError, ConfigError (no such column).
    """
    source = FileBytes(path, storage, storage.stat(path).size)
    footer = read_footer(source)
    with source.error_context(footer.offset, "the footer"):
        column, num_leaves = find_column(footer.schema, read.column, path, numbers=read.allow_float)
        chunks = column_chunks(footer, column, num_leaves)
        _check_chunks(chunks, column)
    first_rows = np.cumsum(chunks["num_rows"]) - chunks["num_rows"]
    if span is not None:
        begins = np.where(chunks["num_values"] > 0, chunks["start"], 0)
        chunks = chunks[(span[0] <= begins) & (begins < span[1])]
    is_threaded = chunks["stored_bytes"].sum() >= threaded_bytes and not source.is_prefetched
    search = PageScanContext(
        source=source,
        column=column,
        limit=footer.offset,
        documents=read.count_documents,
        in_flight=source.limits.max_reads if is_threaded else 1,
    )
    located = find_pages(search, chunks)
    blocks, first_tokens = blocks_of(located.pages, located.first_page)
    return FileIndex(
        rows=int(chunks["num_rows"].sum()),
        tokens=int(first_tokens[-1]),
        token_dtype=column.dtype,
        chunks=_chunk_table(chunks, located, first_tokens, first_rows),
        blocks=blocks,
        structure=footer.digest,
        meta=column.to_meta(),
        scanned_bytes=located.scanned_bytes,
        column=column.name,
        note=located.note,
        token_range=find_value_range(chunks, column),
    )


def find_value_range(chunks: Chunks, column: Column) -> tuple[int, int] | None:
    """Return the smallest and the largest value of the chunks that have statistics, or None if no
    chunk has any.

    Args:
        chunks: CHUNK_DTYPE [n].
    """
    is_unsigned = column.dtype.startswith("u")
    dtype = np.dtype(_STATISTICS_DTYPES.get((Physical(column.physical), is_unsigned), "V0"))
    if not dtype.itemsize:
        return None
    is_exact = chunks["ranges"] & _INEXACT == 0
    has_new = _has_fields(chunks, _NEW_FIELDS, dtype.itemsize) & is_exact
    # These compare signed values
    has_old = _has_fields(chunks, _OLD_FIELDS, dtype.itemsize) & (not is_unsigned) & ~has_new
    lows, highs = (
        np.concatenate([chunks[new][has_new], chunks[old][has_old]])
        .astype(f"<u{dtype.itemsize}")
        .view(dtype)
        for new, old in (("min_value", "old_min"), ("max_value", "old_max"))
    )
    valid = lows <= highs
    if not valid.any():
        return None
    return int(lows[valid].min()), int(highs[valid].max())


def _has_fields(chunks: Chunks, fields: tuple[int, int], width: int) -> npt.NDArray[np.bool_]:
    """Return whether chunks have both fields of Statistics, given by their ids, in `width` bytes:
    bool [n]."""
    # As `column_chunk` sets them: one bit for values of 4 bytes, another for values of 8
    bits = sum(1 << (field if width == 4 else field + 8) for field in fields)
    has: npt.NDArray[np.bool_] = chunks["ranges"] & bits == bits
    return has


def _check_chunks(chunks: Chunks, column: Column) -> None:
    """Check the types, codecs and counts of chunks. Raises: MalformedError, UnsupportedError."""
    refuse(
        chunks["physical"] != column.physical,
        lambda i: f"row group {i} has a different column instead of {column.name!r}",
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
    chunks: Chunks, located: ChunkPages, first_tokens: Int64s, first_rows: Int64s
) -> Array:
    """Make the chunk table that the index stores: CHUNK_DTYPE of `formats.base` [num_chunks]."""
    table = np.zeros(len(chunks), CHUNK_DTYPE)
    table["row_group"] = chunks["row_group"]
    table["codec"] = chunks["codec"]
    table["dictionary_offset"], table["dictionary_bytes"] = located.dictionaries.T
    table["first_row"] = first_rows[chunks["row_group"]]
    table["first_token"] = first_tokens[:-1]
    return table
