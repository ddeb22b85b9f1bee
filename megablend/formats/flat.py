"""Documents of flat columns, which have one token in each row: a document is a file or a row group,
or ends with a separator token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megablend.arrays import Int64s
from megablend.config.read_spec import OptionValue, ReadSpec
from megablend.errors import ConfigError
from megablend.formats.base import (
    NO_OFFSETS,
    Array,
    BaseFormat,
    BlockReader,
    DecodedBlock,
    FileIndex,
    OpenedFile,
)
from megablend.formats.blocks import place_blocks
from megablend.formats.decoded import DecodedBlocks
from megablend.formats.fetch import BATCH_BYTES, read_blocks
from megablend.formats.raw.boundaries import Separator, count_documents, find_offsets
from megablend.storage.base import Storage
from megablend.storage.ranges import FetchedRanges, FileRanges, portions

DOCUMENTS = "documents"
"""Name of the option that divides a flat column into documents. A file's `meta` has a key of the
same name if its documents are not its rows."""
FILE = "file"
"""Value of the option `documents`: each file is one document."""
ROW_GROUP = "row_group"
"""Value of the option `documents`: each row group (Parquet) or record batch (Arrow) is one
document."""


class ColumnFormat(BaseFormat):
    """A format with columns. The option `documents` divides a flat column into documents.

    Formats that derive from it index and read rows; their `index` and `open` pass the result
    through `divide` and `read_divided`.
    """

    def check_options(self, options: Mapping[str, OptionValue]) -> None:
        """Accept `documents`: FILE, ROW_GROUP, or the token that ends documents."""
        super().check_options({name: value for name, value in options.items() if name != DOCUMENTS})
        value = options.get(DOCUMENTS, FILE)
        is_token = isinstance(value, int) and not isinstance(value, bool)
        if value not in (FILE, ROW_GROUP) and not is_token:
            raise ValueError(
                f"documents: found {value!r}, expected {FILE}, {ROW_GROUP} or {{eod_token: ID}}"
            )

    def divide(self, path: str, read: ReadSpec, found: FileIndex, storage: Storage) -> FileIndex:
        """Convert an index in which each row is a document to an index of the documents that the
        config requests. Return `found` itself if the config requests no division.

        Raises: ConfigError if the column contains lists, or its type cannot hold the separator; the
        errors of reading.
        """
        documents = read.option(DOCUMENTS)
        if documents is None:
            return found
        if not is_flat(found.meta):
            raise ConfigError(
                f"{path}: `documents` is set, but each list in column {found.column!r} is already a document; "
                "remove `documents`"
            )
        blocks = found.blocks[found.blocks["tokens"] > 0].copy()
        scanned_bytes = 0
        starts = np.zeros(0, np.int64)
        if documents == ROW_GROUP:
            firsts = found.chunks["first_token"] if self.has_row_groups else blocks["first_token"]
            starts = np.unique(firsts[(firsts > 0) & (firsts < found.tokens)])
        elif documents != FILE:
            starts = self._find_starts(path, read, found, int(documents), storage)
            scanned_bytes = int(blocks["stored_bytes"].sum(dtype=np.int64))
        count_documents(blocks, blocks["first_token"], starts, found.tokens)
        chunks = found.chunks.copy()
        # The document that begins at token 0 is not among `starts`
        has_first_document = chunks["first_token"] > 0
        chunks["first_row"] = np.searchsorted(starts, chunks["first_token"]) + has_first_document
        return dataclasses.replace(
            found,
            rows=int(blocks["rows"].sum()),
            blocks=blocks,
            chunks=chunks,
            meta={**found.meta, DOCUMENTS: documents},
            scanned_bytes=found.scanned_bytes + scanned_bytes,
        )

    def _find_starts(
        self, path: str, read: ReadSpec, index: FileIndex, token: int, storage: Storage
    ) -> Int64s:
        """Read the column, and return the positions of the tokens that follow a separator, in
        order: int64 [m]."""
        if token > np.iinfo(index.token_dtype).max:
            raise ConfigError(
                f"{path}: eod_token {token} does not fit the token dtype {index.token_dtype}; correct `documents`"
            )
        size = storage.stat(path).size
        opened = OpenedFile(
            size=size, token_dtype=index.token_dtype, structure=index.structure, meta=index.meta
        )
        reader = self.open(path, read.column, opened, storage=storage)
        placed = place_blocks(index.blocks)
        parts = [np.zeros(0, np.int64)]
        block_bytes = index.blocks["tokens"] * np.dtype(index.token_dtype).itemsize
        for part in portions(block_bytes, BATCH_BYTES):
            blocks = read_blocks(reader, placed[part], index.chunks, storage, pieces=False)
            for first, block in zip(placed["first_token"][part].tolist(), blocks, strict=True):
                parts.append(first + 1 + np.flatnonzero(block.tokens == token))
        starts = np.concatenate(parts)
        # No document follows a separator at the end of the file
        in_file: Int64s = starts[starts < index.tokens]
        return in_file


def read_divided(path: str, meta: Mapping[str, Any], reader: BlockReader) -> BlockReader:
    """Return a reader of the documents that `ColumnFormat.divide` made, around a reader of rows;
    return `reader` itself if documents are rows."""
    documents = meta.get(DOCUMENTS)
    if documents is None:
        return reader
    separator = None if documents in (FILE, ROW_GROUP) else Separator(int(documents), True)
    return _DividedReader(path, reader, separator)


def is_flat(meta: Mapping[str, Any]) -> bool:
    """Return whether a column is flat (not of lists), given the file's `meta`; False for formats
    without columns."""
    column = meta.get("column")
    if isinstance(column, dict):
        # Arrow
        return bool(column["kind"] == "flat")
    # Parquet
    return bool(meta.get("max_rep") == 0)


@dataclass(frozen=True, slots=True)
class _DividedReader:
    """A reader that decodes blocks of a flat column divided into documents; see BlockReader."""

    path: str
    inner: BlockReader
    """Decodes the blocks as rows."""
    separator: Separator | None
    """The token that ends documents; None if they are files or row groups."""

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> Sequence[FileRanges]:
        """See BlockReader.byte_ranges. To find documents that are not separated by a token, no
        bytes are needed."""
        if not tokens and self.separator is None:
            return []
        return self.inner.byte_ranges(_of_rows(blocks), chunks, fetched)

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> Sequence[DecodedBlock]:
        """See BlockReader.decode."""
        decoded = self.inner.decode(_of_rows(blocks), chunks, fetched, pieces=False)
        # Some formats always return the offsets of rows, which are not used
        tokens = [block.tokens for block in decoded]
        offsets = self._offsets(blocks, tokens) if pieces else [NO_OFFSETS] * len(tokens)
        return DecodedBlocks.of(
            [
                DecodedBlock(block_tokens, block_offsets)
                for block_tokens, block_offsets in zip(tokens, offsets, strict=True)
            ]
        )

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[Int64s], int]:
        """See BlockReader.find_pieces."""
        if self.separator is None:
            return self._offsets(blocks, [None] * len(blocks)), 0
        decoded = self.decode(blocks, chunks, fetched)
        offsets = [block.offsets for block in decoded]
        return offsets, int(blocks["stored_bytes"].sum(dtype=np.int64))

    def _offsets(self, blocks: Array, tokens: Sequence[Array | None]) -> list[Int64s]:
        return [
            find_offsets(self.path, block, self.separator, block_tokens)
            for block, block_tokens in zip(blocks, tokens, strict=True)
        ]


def _of_rows(blocks: Array) -> Array:
    """Copy blocks for the reader of rows, and mark their document counts as unknown: they are the
    counts of the divided column, not counts of rows."""
    rows: Array = blocks.copy()
    rows["rows"] = -1
    rows["ends"] = -1
    rows["flags"] = 0
    return rows
