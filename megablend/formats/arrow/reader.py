"""Arrow IPC files: a record batch is a block.

A block's `offset` is that of its message. Its `stored_bytes` count the message and the token
column's buffers: other columns of the batch are not read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megablend.config.read_spec import ReadSpec
from megablend.errors import CorruptFileError, UnsupportedFileError
from megablend.formats.arrow.batch_format import BatchFormat
from megablend.formats.arrow.footer import (
    MAGIC,
    batch_places,
    read_footer,
    read_schema,
)
from megablend.formats.base import (
    BlockReader,
    FileIndex,
    OpenedFile,
    changed_error,
    check_size,
    check_structure,
)
from megablend.storage.base import Storage
from megablend.system.digest import hex_digest


class ArrowFormat(BatchFormat):
    """The format of Arrow IPC files (also called Feather V2)."""

    name = "arrow"
    suffixes: Sequence[str] = (".arrow", ".feather", ".ipc")

    def recognizes(self, path: str, storage: Storage) -> bool:
        """Return whether the file begins like an Arrow file."""
        return storage.read(path, 0, min(len(MAGIC), storage.stat(path).size)) == MAGIC

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the record batches, and count their tokens from list offsets and validity bitmaps;
        see Format.index."""
        size = storage.stat(path).size
        footer = read_footer(path, size, storage)
        places = batch_places(path, size, footer)
        schema = read_schema(path, size, footer)
        return self.index_batches(
            path, read, places, schema, storage, structure=hex_digest(footer), meta={}
        )

    def open(
        self, path: str, column: str | None, file: OpenedFile, *, storage: Storage
    ) -> BlockReader:
        """Return a reader of an indexed file; see Format.open."""
        size = check_size(path, file.size, storage)
        try:
            footer = read_footer(path, size, storage)
            check_structure(path, hex_digest(footer), file, "footer")
            places = batch_places(path, size, footer)
        except (CorruptFileError, UnsupportedFileError) as error:
            raise changed_error(path, error) from error
        return self.make_reader(path, file, np.sort(places, order="offset"))


ARROW = ArrowFormat()
