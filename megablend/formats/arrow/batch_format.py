"""The code that the formats of Arrow files and Arrow streams share. In both, a block is a record
batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from megablend.config.read_spec import ReadSpec
from megablend.formats.arrow.batch_reader import ArrowReader, list_batch_ranges
from megablend.formats.arrow.column import Column, find_column
from megablend.formats.arrow.count_batches import count_batches
from megablend.formats.base import Array, BlockReader, FileIndex, OpenedFile, Stops
from megablend.formats.blocks import single_chunk
from megablend.formats.flat import ColumnFormat, read_divided
from megablend.storage.base import Storage
from megablend.storage.ranges import FileRanges


class BatchFormat(ColumnFormat):
    """A format whose blocks are record batches. Subclasses find where the batches are."""

    reader_block_bytes: int = 32

    def list_ranges(self, path: str, blocks: Array, stops: Stops) -> list[FileRanges]:
        """See Format.list_ranges."""
        return list_batch_ranges(path, blocks, stops)

    def index_batches(
        self,
        path: str,
        read: ReadSpec,
        places: Array,
        schema: pa.Schema,
        storage: Storage,
        *,
        structure: str,
        meta: Mapping[str, Any],
    ) -> FileIndex:
        """Count the tokens of record batches from list offsets and validity bitmaps; see
        Format.index.

        Args:
            places: PLACE_DTYPE [num_batches].
            structure, meta: as in FileIndex; the column is added to `meta`.
        """
        name, column = find_column(path, read.column, schema, numbers=read.allow_float)
        blocks, scanned_bytes = count_batches(path, places, column, storage)
        index = FileIndex(
            rows=int(blocks["rows"].sum()),
            tokens=int(blocks["tokens"].sum()),
            token_dtype=column.token_dtype,
            chunks=single_chunk(),
            blocks=blocks,
            structure=structure,
            meta={"column": column.to_json(), **meta},
            scanned_bytes=scanned_bytes,
            column=name,
        )
        return self.divide(path, read, index, storage)

    def make_reader(self, path: str, file: OpenedFile, places: Array) -> BlockReader:
        """Return a reader of an indexed file, given the places of its batches in offset order."""
        offsets = np.ascontiguousarray(places["offset"])
        reader = ArrowReader(path, Column.from_json(file.meta["column"]), places, offsets)
        return read_divided(path, file.meta, reader)
