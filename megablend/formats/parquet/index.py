"""A Parquet file's blocks: its data pages, chunk by chunk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from megablend.formats.base import BLOCK_DTYPE, CHUNK_DTYPE, Array, FileIndex, FileToIndex
from megablend.formats.parquet.chunk import ChunkPages, index_chunk
from megablend.formats.parquet.codecs import CODECS, unreadable
from megablend.formats.parquet.column_chunk import ColumnChunk, column_chunks
from megablend.formats.parquet.count import close_documents
from megablend.formats.parquet.footer import read_footer
from megablend.formats.parquet.schema import Column, find_column
from megablend.formats.parquet.source import ByteSource
from megablend.formats.parquet.thrift import MalformedError, UnsupportedError
from megablend.storage.base import Storage

CHUNKS_IN_FLIGHT = 8
THREADED_BYTES = 64 << 20
"""A column of less is indexed before threads would pay."""


def index_file(file: FileToIndex, storage: Storage, *, span: tuple[int, int] | None = None) -> FileIndex:
    """Find and count the pages of a file's token column, or of its chunks that begin within bytes `span`.

    Where tokens are known without a scan, but rows are not, and nobody asked for documents, rows and ends of all blocks are -1.

    Raises: MissingFileError, CorruptFileError, UnsupportedFileError, ConfigError (no such column).
    """
    source = ByteSource(file.path, storage, storage.stat(file.path).size)
    footer = read_footer(source)
    with source.blamed(footer.offset, "the footer"):
        leaf, num_leaves = find_column(footer.schema, file.column, file.path, numbers=file.numbers)
        chunks = column_chunks(footer, leaf.ordinal, num_leaves)
        for chunk in chunks:
            _check_chunk(chunk, leaf)
    rows = np.array([chunk.num_rows for chunk in chunks], np.int64)
    first_rows = np.cumsum(rows) - rows
    if span is not None:
        chunks = [chunk for chunk in chunks if span[0] <= (chunk.start if chunk.num_values else 0) < span[1]]
    parts = _index_chunks(source, chunks, leaf, footer.offset, file.documents)
    blocks = _block_table(parts)
    return FileIndex(
        rows=sum(chunk.num_rows for chunk in chunks),
        tokens=int(blocks["tokens"].sum()),
        token_dtype=leaf.dtype,
        chunks=_chunk_table(chunks, parts, first_rows),
        blocks=blocks,
        structure=footer.digest,
        meta=leaf.to_meta(),
        scanned_bytes=sum(part.scanned_bytes for part in parts),
    )


def _index_chunks(
    source: ByteSource, chunks: list[ColumnChunk], column: Column, limit: int, documents: bool
) -> list[ChunkPages]:
    """The pages of all chunks; of a large file several chunks at a time, so that many reads are in flight."""

    def index(chunk: ColumnChunk) -> ChunkPages:
        return index_chunk(source, chunk, column, limit=limit, documents=documents)

    if sum(chunk.stored_bytes for chunk in chunks) < THREADED_BYTES:
        return list(map(index, chunks))
    with ThreadPoolExecutor(CHUNKS_IN_FLIGHT) as threads:
        return list(threads.map(index, chunks))


def _check_chunk(chunk: ColumnChunk, column: Column) -> None:
    if chunk.physical != column.physical or chunk.path != column.path:
        raise MalformedError(f"row group {chunk.row_group} has another column in place of {column.name!r}")
    if chunk.codec not in CODECS:
        raise UnsupportedError(f"row group {chunk.row_group}: {unreadable(chunk.codec)}")
    if column.max_rep == 0 and chunk.num_values != chunk.num_rows:
        raise MalformedError(f"row group {chunk.row_group} has {chunk.num_values} values for {chunk.num_rows} rows")


def _block_table(parts: list[ChunkPages]) -> Array:
    pages = [part.pages for part in parts]
    blocks = np.zeros(sum(map(len, pages)), BLOCK_DTYPE)
    is_known = all((p["rows"] >= 0).all() for p in pages)
    end = 0
    for number, chunk_pages in enumerate(pages):
        begin, end = end, end + len(chunk_pages)
        part = blocks[begin:end]
        part["chunk"] = number
        for name in ("offset", "stored_bytes", "decoded_bytes", "tokens", "encoding"):
            part[name] = chunk_pages[name]
        if is_known:
            part["rows"] = chunk_pages["rows"]
            part["ends"], part["flags"] = close_documents(chunk_pages)
        else:
            part["rows"] = part["ends"] = -1
    blocks["first_token"] = np.cumsum(blocks["tokens"]) - blocks["tokens"]
    return blocks


def _chunk_table(chunks: list[ColumnChunk], parts: list[ChunkPages], first_rows: npt.NDArray[np.int64]) -> Array:
    table = np.zeros(len(chunks), CHUNK_DTYPE)
    table["row_group"] = [chunk.row_group for chunk in chunks]
    table["codec"] = [chunk.codec for chunk in chunks]
    table["dictionary_offset"] = [part.dictionary[0] for part in parts]
    table["dictionary_bytes"] = [part.dictionary[1] for part in parts]
    table["first_row"] = first_rows[table["row_group"]]
    tokens = np.array([part.pages["tokens"].sum() for part in parts], np.int64)
    table["first_token"] = np.cumsum(tokens) - tokens
    return table
