"""Arrow IPC streams: a record batch is a block, which is decoded like that of an Arrow file.

A stream has no list of its batches, so the index stores their positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megablend.config.read_spec import ReadSpec
from megablend.errors import CHANGED_REMEDY, ChangedFileError
from megablend.formats.arrow.batch_reader import ArrowReader, list_batch_ranges
from megablend.formats.arrow.column import Column, find_column
from megablend.formats.arrow.count_batches import count_batches
from megablend.formats.arrow_stream.messages import (
    CONTINUATION,
    read_schema,
    read_stream,
)
from megablend.formats.arrow_stream.places import pack_places, unpack_places
from megablend.formats.base import Array, BlockReader, FileIndex, OpenedFile, Stops, check_size
from megablend.formats.blocks import single_chunk
from megablend.formats.flat import ColumnFormat, read_divided
from megablend.storage.base import Storage
from megablend.storage.ranges import FileRanges


class ArrowStreamFormat(ColumnFormat):
    """Arrow IPC streams; also `.arrow` files that begin like one."""

    name = "arrow-stream"
    suffixes: Sequence[str] = (".arrow", ".arrows")
    reader_block_bytes: int = 32
    # The position of a message is known only from the previous message
    requests_in_turn: bool = True

    def recognizes(self, path: str, storage: Storage) -> bool:
        """Whether the file begins with a message."""
        return storage.read(path, 0, min(4, storage.stat(path).size)) == CONTINUATION

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the record batches, message after message, and count their tokens; see
        Format.index."""
        stream = read_stream(path, storage.stat(path).size, storage)
        schema = read_schema(path, stream.schema_bytes)
        name, column = find_column(path, read.column, schema, numbers=read.allow_float)
        blocks, scanned_bytes = count_batches(path, stream.places, column, storage)
        index = FileIndex(
            rows=int(blocks["rows"].sum()),
            tokens=int(blocks["tokens"].sum()),
            token_dtype=column.token_dtype,
            chunks=single_chunk(),
            blocks=blocks,
            structure=_digest(stream.schema_bytes, stream.places),
            meta={
                "column": column.to_json(),
                "schema_bytes": len(stream.schema_bytes),
                "batches": pack_places(stream.places),
            },
            scanned_bytes=scanned_bytes,
            column=name,
        )
        return self.divide(path, read, index, storage)

    def list_ranges(self, path: str, blocks: Array, stops: Stops) -> list[FileRanges]:
        """See Format.list_ranges."""
        return list_batch_ranges(path, blocks, stops)

    def open(
        self, path: str, column: str | None, file: OpenedFile, *, storage: Storage
    ) -> BlockReader:
        """Return a reader of an indexed stream; see Format.open."""
        size = check_size(path, file, storage)
        places = unpack_places(path, file.meta["batches"], size)
        schema_bytes = storage.read(path, 0, min(size, int(file.meta["schema_bytes"])))
        digest = _digest(schema_bytes, places)
        if digest != file.structure:
            raise ChangedFileError(
                path,
                f"its schema's digest is {digest}, but was {file.structure} when it was indexed; {CHANGED_REMEDY}",
            )
        offsets = np.ascontiguousarray(places["offset"])
        reader = ArrowReader(path, Column.from_json(file.meta["column"]), places, offsets)
        return read_divided(path, file.meta, reader)


def _digest(schema_bytes: bytes, places: Array) -> str:
    return hashlib.blake2b(schema_bytes + places.tobytes(), digest_size=16).hexdigest()


ARROW_STREAM = ArrowStreamFormat()
