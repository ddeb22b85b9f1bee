"""Arrow IPC files: a record batch is a block.

A block's `offset` is its message's; its `stored_bytes` are those of the message and of the token column's buffers,
which are all that is read: other columns of the batch are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megablend.errors import CHANGED_REMEDY, ChangedFileError, CorruptFileError, UnsupportedFileError
from megablend.formats.arrow.buffers import MAX_BYTES, Buffers
from megablend.formats.arrow.column import Column, find_column
from megablend.formats.arrow.documents import decode, find_documents
from megablend.formats.arrow.footer import batch_places, footer_digest, read_footer, read_schema
from megablend.formats.arrow.message import Batch, BatchError, column_buffers, parse_batch
from megablend.formats.base import (
    BLOCK_DTYPE,
    ENDS_AT_DOCUMENT_END,
    Array,
    BlockReader,
    DecodedBlock,
    FileIndex,
    FileToIndex,
    OpenedFile,
)
from megablend.formats.blocks import single_chunk
from megablend.storage.base import Storage


class ArrowFormat:
    """Arrow IPC files (also called Feather V2)."""

    name = "arrow"
    suffixes: Sequence[str] = (".arrow", ".feather", ".ipc")
    documents_known: bool = True
    reader_block_bytes: int = 32

    def files(self, path: str) -> Sequence[str]:
        """The file itself."""
        return [path]

    def index(self, file: FileToIndex, *, storage: Storage) -> FileIndex:
        """Find the record batches and count their tokens from offsets and validity bitmaps; see Format.index."""
        path = file.path
        size = storage.stat(path).size
        footer = read_footer(path, size, storage)
        places = batch_places(path, size, footer)
        name, found = find_column(path, file.column, read_schema(path, size, footer), numbers=file.numbers)
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
        return ArrowReader(path, Column.from_json(file.meta["column"]), places, offsets, storage)


ARROW = ArrowFormat()


@dataclass(frozen=True, slots=True)
class ArrowReader:
    """Reads record batches of one file. Holds nothing but where they lie."""

    path: str
    column: Column
    places: Array
    """PLACE_DTYPE [num_batches], sorted by offset."""
    offsets: Array
    """int64 [num_batches]: the places' offsets, side by side: a search in a field of a table copies all of it."""
    storage: Storage

    def read(self, blocks: Array, chunks: Array, *, pieces: bool = True) -> list[DecodedBlock]:
        """Decode record batches; see BlockReader.read."""
        return [self._read(block) for block in blocks]

    def pieces(self, blocks: Array, chunks: Array) -> tuple[list[npt.NDArray[np.int64]], int]:
        """See BlockReader.pieces; read from validity bitmaps and offsets."""
        found, fetched_bytes = [], 0
        for block in blocks:
            batch, place = self._batch(block)
            buffers = _buffers(self.path, batch, place, self.storage)
            try:
                offsets = find_documents(batch, self.column, buffers).offsets
            except BatchError as error:
                raise CorruptFileError(self.path, f"record batch {error}", offset=int(block["offset"])) from error
            self._check(block, len(offsets) - 1, int(offsets[-1]))
            found.append(offsets)
            fetched_bytes += buffers.fetched_bytes
        return found, fetched_bytes

    def _read(self, block: np.void) -> DecodedBlock:
        batch, place = self._batch(block)
        try:
            decoded = decode(batch, self.column, _buffers(self.path, batch, place, self.storage))
        except BatchError as error:
            raise CorruptFileError(self.path, f"record batch {error}", offset=int(block["offset"])) from error
        self._check(block, len(decoded.offsets) - 1, len(decoded.tokens))
        return decoded

    def _batch(self, block: np.void) -> tuple[Batch, np.void]:
        """The message of a block, and where its batch lies."""
        offset = int(block["offset"])
        number = int(np.searchsorted(self.offsets, offset))
        if number == len(self.offsets) or self.offsets[number] != offset:
            raise CorruptFileError(self.path, "no record batch begins here; verify the cache", offset=offset)
        place = self.places[number]
        try:
            return _load(self.path, self.column, place, self.storage), place
        except BatchError as error:
            raise CorruptFileError(self.path, f"record batch {error}", offset=offset) from error

    def _check(self, block: np.void, rows: int, tokens: int) -> None:
        """A batch must hold what the index says."""
        if (rows, tokens) != (int(block["rows"]), int(block["tokens"])):
            raise CorruptFileError(
                self.path,
                f"record batch has {rows} rows and {tokens} tokens, had {block['rows']} and {block['tokens']} when it "
                f"was indexed; {CHANGED_REMEDY}",
                offset=int(block["offset"]),
            )


def _load(path: str, column: Column, place: np.void, storage: Storage) -> Batch:
    """The message of a batch. Raises: BatchError."""
    metadata = storage.read(path, int(place["offset"]), int(place["metadata_bytes"]))
    return parse_batch(metadata, int(place["body_bytes"]), column)


def _buffers(path: str, batch: Batch, place: np.void, storage: Storage) -> Buffers:
    body = int(place["offset"]) + int(place["metadata_bytes"])
    return Buffers(batch, lambda offset, size: storage.read(path, body + offset, size))


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
