"""The same documents, written in each format."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megablend.config.read_spec import ReadSpec, make_options
from megablend.formats import format_of
from megablend.formats.base import BLOCK_DTYPE, Array, BlockReader, FileIndex, OpenedFile
from megablend.formats.blocks import place_blocks
from megablend.storage.base import Storage
from megablend.testing.documents import Documents, list_pieces
from tests.storages import STORAGE

IDX_CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}
RAW_EOD = 60_000
"""Ends documents in raw files; no other token of the tests."""
BLOCK_BYTES = 256
"""Of the tests' `.bin` files, so that a few documents make several blocks."""


def write_arrow(
    path: Path, documents: Documents, *, codec: str | None = None, rows: int = 7
) -> None:
    table = pa.table(
        {"text": ["x"] * len(documents), "ids": pa.array(documents, pa.list_(pa.int32()))}
    )
    with pa.ipc.new_file(
        path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_arrow_stream(path: Path, documents: Documents) -> None:
    """As Hugging Face's save_to_disk does."""
    table = pa.table(
        {"text": ["x"] * len(documents), "ids": pa.array(documents, pa.list_(pa.int32()))}
    )
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_parquet(path: Path, documents: Documents, *, page_index: bool, version: str) -> None:
    table = pa.table(
        {"text": ["x"] * len(documents), "ids": pa.array(documents, pa.list_(pa.int32()))}
    )
    pq.write_table(
        table,
        path,
        data_page_size=100,
        data_page_version=version,
        write_batch_size=5,
        row_group_size=40,
        use_dictionary=False,
        write_page_index=page_index,
        write_page_checksum=True,
    )


def write_megatron(path: Path, documents: Documents, *, dtype: str = "int32") -> None:
    """A pair as Megatron's IndexedDatasetBuilder writes it, one sequence a document."""
    lengths = np.array([len(document or []) for document in documents], "<i4")
    sizes = lengths.astype("<i8") * np.dtype(dtype).itemsize
    tokens = [token for document in documents for token in document or []]
    path.with_suffix(".bin").write_bytes(
        np.array(tokens, np.dtype(dtype).newbyteorder("<")).tobytes()
    )
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, IDX_CODES[dtype], len(lengths), len(lengths) + 1)
        + lengths.tobytes()
        + (np.cumsum(sizes) - sizes).astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )


def write_raw(path: Path, documents: Documents) -> None:
    """A `.npy` of all documents, each followed by RAW_EOD."""
    tokens = [token for document in documents for token in (*(document or []), RAW_EOD)]
    np.save(path, np.array(tokens, np.int32))


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to write a file, and how its column is called."""

    format: str
    suffix: str
    column: str | None
    write: Callable[[Path, Documents], None]
    separator: tuple[int, ...] = ()
    """Tokens that each document ends with, as it is read."""
    lengths_known: bool = False
    """The lengths of documents are known without reading their tokens."""

    def as_read(self, documents: Documents) -> list[list[int]]:
        """Documents as the format reads them."""
        return [[*(document or []), *self.separator] for document in documents]


KINDS = {
    "parquet": Kind(
        "parquet",
        ".parquet",
        "ids",
        lambda path, docs: write_parquet(path, docs, page_index=True, version="1.0"),
    ),
    "parquet-v2-unindexed": Kind(
        "parquet",
        ".parquet",
        "ids",
        lambda path, docs: write_parquet(path, docs, page_index=False, version="2.0"),
    ),
    "arrow": Kind("arrow", ".arrow", "ids", write_arrow),
    "arrow-lz4": Kind(
        "arrow", ".arrow", "ids", lambda path, docs: write_arrow(path, docs, codec="lz4")
    ),
    "arrow-stream": Kind("arrow-stream", ".arrow", "ids", write_arrow_stream),
    "megatron": Kind("megatron", ".bin", None, write_megatron, lengths_known=True),
}
ALL_KINDS = {**KINDS, "raw": Kind("raw", ".npy", None, write_raw, separator=(RAW_EOD,))}
"""With those that put a token between documents."""
OPTIONS = {".npy": make_options({"eod_token": RAW_EOD})}
"""Of formats, by the suffix of their files."""


def index(
    path: Path, column: str | None, *, documents: bool = True, storage: Storage = STORAGE
) -> FileIndex:
    """What a format finds in a file, its blocks as readers take them."""
    read = ReadSpec(
        column=column,
        count_documents=documents,
        block_bytes=BLOCK_BYTES,
        options=OPTIONS.get(path.suffix, ()),
    )
    found = format_of(str(path), storage).index(str(path), read, storage=storage)
    assert found.blocks.dtype == BLOCK_DTYPE
    return dataclasses.replace(found, blocks=place_blocks(found.blocks))


def opened(
    path: Path,
    column: str | None,
    found: FileIndex,
    size: int | None = None,
    *,
    storage: Storage = STORAGE,
) -> BlockReader:
    """A reader, as the index would open it; `size` of the file when it was indexed, its present one if not given."""
    file = OpenedFile(
        size=storage.stat(str(path)).size if size is None else size,
        token_dtype=found.token_dtype,
        structure=found.structure,
        meta=found.meta,
    )
    return format_of(str(path), storage).open(str(path), column, file, storage=storage)


def pieces(reader: BlockReader, blocks: Array, chunks: Array) -> list[list[list[int]]]:
    """The pieces of each block, as lists."""
    return list_pieces(reader, blocks, chunks, STORAGE)
