"""Files of a format under test: written, indexed and opened as the index does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from megablend.config.read_spec import OptionValue, ReadSpec, make_options
from megablend.formats.base import BLOCK_DTYPE, BlockReader, FileIndex, Format, OpenedFile
from megablend.formats.blocks import place_blocks
from megablend.storage.base import Storage
from megablend.storage.by_scheme import make_storage
from megablend.testing.documents import MIXED, Documents


class FormatFiles:
    """The part that a subclass of the contract provides, and how the tests use it."""

    format: Format
    """The format."""
    suffix: str
    """Suffix of the files that `write` writes."""
    column: str | None = None
    """The column that `write` writes the documents to; None if the format has no columns."""
    options: Mapping[str, OptionValue] = {}
    """The format's options with which files are indexed."""
    separator: tuple[int, ...] = ()
    """Tokens that each document ends with when it is read, but not when it is written."""
    token_dtype = "int32"
    """Dtype of the tokens that `write` writes."""
    block_bytes = 256
    """Block size of the indexes: `MIXED` must become more than three blocks."""
    lengths_are_stored = False
    """Whether documents in a block are found without reading any data."""
    truncation_is_visible = True
    """Whether a file that was cut short before it was ever indexed is recognised by its own
    content."""
    blocks_are_marked = True
    """Whether a block's bytes show that they are a block, so that a wrong offset is recognised."""

    def write(self, path: Path, documents: Documents) -> None:
        """Write documents to a file, and to the other files that belong to `path`
        if there are any; deterministic."""
        raise NotImplementedError

    def as_read(self, documents: Documents) -> list[list[int]]:
        """The documents as the format reads them."""
        return [[*(document or []), *self.separator] for document in documents]

    def index(
        self,
        path: Path | str,
        *,
        documents: bool = True,
        column: str | None = None,
        storage: Storage | None = None,
    ) -> FileIndex:
        """Index a file, by the contract's column if `column` is None."""
        read = self.make_spec(column or self.column, documents)
        found = self.format.index(str(path), read, storage=storage or make_storage())
        assert found.blocks.dtype == BLOCK_DTYPE
        return dataclasses.replace(found, blocks=place_blocks(found.blocks))

    def open(
        self,
        path: Path | str,
        found: FileIndex,
        size: int | None = None,
        *,
        storage: Storage | None = None,
    ) -> BlockReader:
        """Open an indexed file, which had `size` bytes
        when it was indexed (None: its present size)."""
        storage = storage or make_storage()
        file = OpenedFile(
            size=storage.stat(str(path)).size if size is None else size,
            token_dtype=found.token_dtype,
            structure=found.structure,
            meta=found.meta,
        )
        return self.format.open(str(path), self.column, file, storage=storage)

    def write_mixed(self, folder: Path) -> Path:
        """Write the documents `MIXED` to a file of a folder."""
        path = folder / f"x{self.suffix}"
        self.write(path, MIXED)
        return path

    def make_spec(self, column: str | None, documents: bool) -> ReadSpec:
        """The ReadSpec with which a file is indexed."""
        return ReadSpec(
            format=self.format.name,
            column=column,
            count_documents=documents,
            block_bytes=self.block_bytes,
            options=make_options(self.options),
        )
