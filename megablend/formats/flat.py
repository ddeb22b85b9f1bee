"""Documents of flat columns, which have one token in each row:
a file, a row group, or what a separator token ends."""

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
"""The option, and the key of a file's `meta` if its documents were divided."""
FILE = "file"
ROW_GROUP = "row_group"
"""Of Arrow files a record batch."""


class ColumnFormat(BaseFormat):
    """A format with columns, of which a flat one may be divided into documents
    by the option `documents`.

    Formats that derive from it find rows, and pass what `index` and `open` return through `divide`
    and `read_divided`.
    """

    def check_options(self, options: Mapping[str, OptionValue]) -> None:
        """Accept `documents`: FILE, ROW_GROUP, or the token that ends documents."""
        super().check_options({name: value for name, value in options.items() if name != DOCUMENTS})
        value = options.get(DOCUMENTS, FILE)
        if value not in (FILE, ROW_GROUP) and (
            isinstance(value, bool) or not isinstance(value, int)
        ):
            raise ValueError(
                f"documents: found {value!r}, expected {FILE}, {ROW_GROUP} or {{eod_token: ID}}"
            )

    def divide(self, path: str, read: ReadSpec, found: FileIndex, storage: Storage) -> FileIndex:
        """The index of a file whose documents are those that the config asks for;
        `found` itself if these are rows.

        Raises: ConfigError if the column is of lists, or its type cannot hold the token; as reading
            does.
        """
        documents = read.option(DOCUMENTS)
        if documents is None:
            return found
        if not is_flat(found.meta):
            raise ConfigError(
                f"{path}: column {found.column!r} contains lists, each of which is a document; "
                "remove `documents`"
            )
        blocks = found.blocks[found.blocks["tokens"] > 0].copy()
        scanned_bytes = 0
        starts = np.zeros(0, np.int64)
        if documents == ROW_GROUP:
            firsts = found.chunks["first_token"] if self.has_row_groups else blocks["first_token"]
            starts = np.unique(firsts[(firsts > 0) & (firsts < found.tokens)])
        elif documents != FILE:
            starts = self._find_ends(path, read, found, int(documents), storage)
            scanned_bytes = int(blocks["stored_bytes"].sum(dtype=np.int64))
        count_documents(blocks, blocks["first_token"], starts, found.tokens)
        chunks = found.chunks.copy()
        chunks["first_row"] = np.searchsorted(starts, chunks["first_token"]) + (
            chunks["first_token"] > 0
        )
        return dataclasses.replace(
            found,
            rows=int(blocks["rows"].sum()),
            blocks=blocks,
            chunks=chunks,
            meta={**found.meta, DOCUMENTS: documents},
            scanned_bytes=found.scanned_bytes + scanned_bytes,
        )

    def _find_ends(
        self, path: str, read: ReadSpec, found: FileIndex, token: int, storage: Storage
    ) -> Int64s:
        """The tokens of a file that follow a separator, in order: int64 [m]. Reads the column."""
        if token > np.iinfo(found.token_dtype).max:
            raise ConfigError(
                f"{path}: eod_token {token} does not fit tokens of {found.token_dtype}; correct `documents`"
            )
        size = storage.stat(path).size
        opened = OpenedFile(
            size=size, token_dtype=found.token_dtype, structure=found.structure, meta=found.meta
        )
        reader = self.open(path, read.column, opened, storage=storage)
        placed = place_blocks(found.blocks)
        starts = [np.zeros(0, np.int64)]
        for part in portions(
            found.blocks["tokens"] * np.dtype(found.token_dtype).itemsize, BATCH_BYTES
        ):
            blocks = read_blocks(reader, placed[part], found.chunks, storage, pieces=False)
            for first, block in zip(placed["first_token"][part].tolist(), blocks, strict=True):
                starts.append(first + 1 + np.flatnonzero(block.tokens == token))
        ends = np.concatenate(starts)
        kept: Int64s = ends[ends < found.tokens]
        return kept

    def open(
        self, path: str, column: str | None, file: OpenedFile, *, storage: Storage
    ) -> BlockReader:
        """See Format.open."""
        raise NotImplementedError


def read_divided(path: str, meta: Mapping[str, Any], reader: BlockReader) -> BlockReader:
    """A reader of the documents that `ColumnFormat.divide` makes, in place of one of rows;
    `reader` itself if they are rows."""
    documents = meta.get(DOCUMENTS)
    if documents is None:
        return reader
    return _DividedReader(
        path, reader, None if documents in (FILE, ROW_GROUP) else Separator(int(documents), True)
    )


def is_flat(meta: Mapping[str, Any]) -> bool:
    """Whether a column is flat (not of lists), from its format's metadata;
    false for formats without columns."""
    column = meta.get("column")
    return bool(column["kind"] == "flat" if isinstance(column, dict) else meta.get("max_rep") == 0)


@dataclass(frozen=True, slots=True)
class _DividedReader:
    """Decodes blocks of a flat column; see BlockReader."""

    path: str
    inner: BlockReader
    separator: Separator | None

    def byte_ranges(
        self,
        blocks: Array,
        chunks: Array,
        fetched: Sequence[FetchedRanges] = (),
        *,
        tokens: bool = True,
    ) -> Sequence[FileRanges]:
        """See BlockReader.byte_ranges; nothing if only documents are needed,
        and no token ends them."""
        if not tokens and self.separator is None:
            return []
        return self.inner.byte_ranges(_of_rows(blocks), chunks, fetched)

    def decode(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges], *, pieces: bool = True
    ) -> Sequence[DecodedBlock]:
        """See BlockReader.decode."""
        decoded = self.inner.decode(_of_rows(blocks), chunks, fetched, pieces=False)
        # Rows' offsets, which some formats always return, are not those of documents.
        tokens = [each.tokens for each in decoded]
        offsets = self._offsets(blocks, tokens) if pieces else [NO_OFFSETS] * len(tokens)
        return DecodedBlocks.of([DecodedBlock(*each) for each in zip(tokens, offsets, strict=True)])

    def find_pieces(
        self, blocks: Array, chunks: Array, fetched: Sequence[FetchedRanges]
    ) -> tuple[list[Int64s], int]:
        """See BlockReader.find_pieces."""
        if self.separator is None:
            return self._offsets(blocks, [None] * len(blocks)), 0
        decoded = self.decode(blocks, chunks, fetched)
        return [each.offsets for each in decoded], int(blocks["stored_bytes"].sum(dtype=np.int64))

    def _offsets(self, blocks: Array, tokens: Sequence[Array | None]) -> list[Int64s]:
        pairs = zip(blocks, tokens, strict=True)
        return [find_offsets(self.path, block, self.separator, each) for block, each in pairs]


def _of_rows(blocks: Array) -> Array:
    """Blocks as the reader of rows takes them, which knows nothing of documents."""
    rows: Array = blocks.copy()
    rows["rows"] = -1
    rows["ends"] = -1
    rows["flags"] = 0
    return rows
