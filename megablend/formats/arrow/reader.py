"""Arrow IPC files: a record batch is a block.

A block's `offset` is its message's; its `stored_bytes` are those of the message and of the token column's buffers,
which are all that is read: other columns of the batch are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megablend.config.read_spec import ReadSpec
from megablend.errors import CHANGED_REMEDY, ChangedFileError, CorruptFileError, UnsupportedFileError
from megablend.formats.arrow.batch_reader import ArrowReader
from megablend.formats.arrow.buffers import MAX_BYTES, Buffers
from megablend.formats.arrow.column import Column, find_column
from megablend.formats.arrow.documents import find_documents
from megablend.formats.arrow.footer import batch_places, footer_digest, read_footer, read_schema
from megablend.formats.arrow.message import Batch, BatchError, column_buffers, parse_batch
from megablend.formats.base import (
    BLOCK_DTYPE,
    ENDS_AT_DOCUMENT_END,
    BaseFormat,
    BlockReader,
    FileIndex,
    OpenedFile,
)
from megablend.formats.blocks import single_chunk
from megablend.storage.base import Storage


class ArrowFormat(BaseFormat):
    """Arrow IPC files (also called Feather V2)."""

    name = "arrow"
    suffixes: Sequence[str] = (".arrow", ".feather", ".ipc")
    reader_block_bytes: int = 32

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the record batches and count their tokens from offsets and validity bitmaps; see Format.index."""
        size = storage.stat(path).size
        footer = read_footer(path, size, storage)
        places = batch_places(path, size, footer)
        name, found = find_column(path, read.column, read_schema(path, size, footer), numbers=read.allow_float)
        blocks = np.zeros(len(places), BLOCK_DTYPE)
        scanned_bytes = 0
        for block, place in zip(blocks, places, strict=True):
            scanned_bytes += _count(path, found, place, block, storage)
        blocks = blocks[blocks["rows"] > 0]
        blocks["first_token"] = np.cumsum(blocks["tokens"]) - blocks["tokens"]
        return FileIndex(
            rows=int(blocks["rows"].sum()),
            tokens=int(blocks["tokens"].sum()),
            token_dtype=found.token_dtype,
            chunks=single_chunk(),
            blocks=blocks,
            structure=footer_digest(footer),
            meta={"column": found.to_json()},
            scanned_bytes=scanned_bytes,
            column=name,
        )

    def open(self, path: str, column: str | None, file: OpenedFile, *, storage: Storage) -> BlockReader:
        """A reader of an indexed file; see Format.open."""
        size = storage.stat(path).size
        if size != file.size:
            raise ChangedFileError(path, f"has {size} bytes, had {file.size} when it was indexed; {CHANGED_REMEDY}")
        try:
            footer = read_footer(path, size, storage)
            digest = footer_digest(footer)
            if digest != file.structure:
                raise ChangedFileError(
                    path, f"footer {digest}, was {file.structure} when it was indexed; {CHANGED_REMEDY}"
                )
            places = batch_places(path, size, footer)
        except (CorruptFileError, UnsupportedFileError) as error:
            raise ChangedFileError(path, f"changed since it was indexed: {error.problem}; {CHANGED_REMEDY}") from error
        places = np.sort(places, order="offset")
        offsets = np.ascontiguousarray(places["offset"])
        return ArrowReader(path, Column.from_json(file.meta["column"]), places, offsets)


ARROW = ArrowFormat()


def _load(path: str, column: Column, place: np.void, storage: Storage) -> Batch:
    """The message of a batch. Raises: BatchError."""
    metadata = storage.read(path, int(place["offset"]), int(place["metadata_bytes"]))
    return parse_batch(metadata, int(place["body_bytes"]), column)


def _buffers(path: str, batch: Batch, place: np.void, storage: Storage) -> Buffers:
    body = int(place["offset"]) + int(place["metadata_bytes"])
    return Buffers(batch, lambda offset, size: np.frombuffer(storage.read(path, body + offset, size), np.uint8))


def _count(path: str, column: Column, place: np.void, block: np.void, storage: Storage) -> int:
    """Fill a batch's row of the block table; returns the bytes of its body that were read."""
    offset = int(place["offset"])
    try:
        batch = _load(path, column, place, storage)
        buffers = _buffers(path, batch, place, storage)
        documents = find_documents(batch, column, buffers)
    except BatchError as error:
        raise CorruptFileError(path, f"record batch {error}", offset=offset) from error
    needed = column_buffers(batch, column)
    stored = int(place["metadata_bytes"]) + int(batch.buffers["size"][needed].sum())
    decoded = sum(buffers.size(number) for number in needed)
    if max(stored, decoded) > MAX_BYTES:
        raise UnsupportedFileError(
            path,
            f"record batch of {batch.rows} rows has {max(stored, decoded)} bytes of tokens, more than {MAX_BYTES}; "
            "write smaller batches (max_chunksize of RecordBatchFileWriter.write_table)",
            offset=offset,
        )
    block["offset"], block["stored_bytes"], block["decoded_bytes"] = offset, stored, decoded
    block["rows"], block["tokens"] = batch.rows, documents.offsets[-1]
    block["ends"] = np.count_nonzero(np.diff(documents.offsets))
    block["flags"] = ENDS_AT_DOCUMENT_END
    return buffers.fetched_bytes
