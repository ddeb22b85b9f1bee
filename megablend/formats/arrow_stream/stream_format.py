"""Arrow IPC streams: a record batch is a block, which is decoded like one of an Arrow file.

A stream has no list of its batches, so the index stores their positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from megablend.config.read_spec import ReadSpec
from megablend.formats.arrow.batch_format import BatchFormat
from megablend.formats.arrow.footer import CONTINUATION
from megablend.formats.arrow_stream.messages import read_schema, read_stream
from megablend.formats.arrow_stream.places import pack_places, unpack_places
from megablend.formats.base import (
    Array,
    BlockReader,
    FileIndex,
    OpenedFile,
    check_size,
    check_structure,
)
from megablend.storage.base import Storage
from megablend.system.digest import hex_digest


class ArrowStreamFormat(BatchFormat):
    """The format of Arrow IPC streams, including `.arrow` files that contain one."""

    name = "arrow-stream"
    suffixes: Sequence[str] = (".arrow", ".arrows")
    # The position of a message is known only from the previous message
    requests_in_turn: bool = True

    def recognizes(self, path: str, storage: Storage) -> bool:
        """Return whether the file begins with a message."""
        return storage.read(path, 0, min(4, storage.stat(path).size)) == CONTINUATION

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the record batches by reading one message after another, and count their tokens; see
        Format.index."""
        stream = read_stream(path, storage.stat(path).size, storage)
        schema = read_schema(path, stream.schema_bytes)
        return self.index_batches(
            path,
            read,
            stream.places,
            schema,
            storage,
            structure=_digest(stream.schema_bytes, stream.places),
            meta={
                "schema_bytes": len(stream.schema_bytes),
                "batches": pack_places(stream.places),
            },
        )

    def open(
        self, path: str, column: str | None, file: OpenedFile, *, storage: Storage
    ) -> BlockReader:
        """Return a reader of an indexed stream; see Format.open."""
        size = check_size(path, file.size, storage)
        places = unpack_places(path, file.meta["batches"], size)
        schema_bytes = storage.read(path, 0, min(size, int(file.meta["schema_bytes"])))
        check_structure(path, _digest(schema_bytes, places), file, "schema")
        return self.make_reader(path, file, places)


def _digest(schema_bytes: bytes, places: Array) -> str:
    return hex_digest(schema_bytes + places.tobytes())


ARROW_STREAM = ArrowStreamFormat()
