"""Arrow IPC files: a record batch is a block.

A block's `offset` is that of its message. Its `stored_bytes` are those of the message and of the
token column's buffers: other columns of the batch are not read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megablend.config.read_spec import ReadSpec
from megablend.errors import (
    CHANGED_REMEDY,
    ChangedFileError,
    CorruptFileError,
    UnsupportedFileError,
)
from megablend.formats.arrow.batch_reader import ArrowReader, list_batch_ranges
from megablend.formats.arrow.column import Column, find_column
from megablend.formats.arrow.count_batches import count_batches
from megablend.formats.arrow.footer import (
    MAGIC,
    batch_places,
    footer_digest,
    read_footer,
    read_schema,
)
from megablend.formats.base import (
    Array,
    BlockReader,
    FileIndex,
    OpenedFile,
    Stops,
    check_size,
)
from megablend.formats.blocks import single_chunk
from megablend.formats.flat import ColumnFormat, read_divided
from megablend.storage.base import Storage
from megablend.storage.ranges import FileRanges


class ArrowFormat(ColumnFormat):
    """Arrow IPC files (also called Feather V2)."""

    name = "arrow"
    suffixes: Sequence[str] = (".arrow", ".feather", ".ipc")
    reader_block_bytes: int = 32

    def recognizes(self, path: str, storage: Storage) -> bool:
        """Whether the file begins like an Arrow file."""
        return storage.read(path, 0, min(len(MAGIC), storage.stat(path).size)) == MAGIC

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the record batches, and count their tokens from list offsets and validity bitmaps;
        see Format.index."""
        size = storage.stat(path).size
        footer = read_footer(path, size, storage)
        places = batch_places(path, size, footer)
        schema = read_schema(path, size, footer)
        name, column = find_column(path, read.column, schema, numbers=read.allow_float)
        blocks, scanned_bytes = count_batches(path, places, column, storage)
        index = FileIndex(
            rows=int(blocks["rows"].sum()),
            tokens=int(blocks["tokens"].sum()),
            token_dtype=column.token_dtype,
            chunks=single_chunk(),
            blocks=blocks,
            structure=footer_digest(footer),
            meta={"column": column.to_json()},
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
        """Return a reader of an indexed file; see Format.open."""
        size = check_size(path, file, storage)
        try:
            footer = read_footer(path, size, storage)
            digest = footer_digest(footer)
            if digest != file.structure:
                raise ChangedFileError(
                    path,
                    f"its footer's digest is {digest}, but was {file.structure} when it was indexed; "
                    f"{CHANGED_REMEDY}",
                )
            places = batch_places(path, size, footer)
        except (CorruptFileError, UnsupportedFileError) as error:
            raise ChangedFileError(
                path, f"changed since it was indexed: {error.problem}; {CHANGED_REMEDY}"
            ) from error
        places = np.sort(places, order="offset")
        offsets = np.ascontiguousarray(places["offset"])
        reader = ArrowReader(path, Column.from_json(file.meta["column"]), places, offsets)
        return read_divided(path, file.meta, reader)


ARROW = ArrowFormat()
