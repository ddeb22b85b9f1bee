"""Files of a format under test, which are written, indexed and opened as in a build and a run."""

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
    """The attributes and methods that a subclass of the contract provides, and helpers that use
    them."""

    format: Format
    """The format under test."""
    suffix: str
    """The suffix of the files that `write` writes."""
    column: str | None = None
    """The column that `write` writes the documents to; None if the format has no columns."""
    options: Mapping[str, OptionValue] = {}
    """The format options that files are indexed with."""
    separator: tuple[int, ...] = ()
    """The tokens that each document ends with when it is read, but not when it is written."""
    token_dtype = "int32"
    """The dtype of the tokens that `write` writes."""
    block_bytes = 256
    """The block size of the indexes. It must be so small that `MIXED` has more than three
    blocks."""
    lengths_are_stored = False
    """Whether the documents of a block can be found without reading its data."""
    truncation_is_visible = True
    """Whether a file's own content shows that it was truncated before it was first indexed."""
    blocks_are_marked = True
    """Whether a block's bytes show that they are a block, so that a wrong offset is recognised."""

    def write(self, path: Path, documents: Documents) -> None:
        """Write documents to a file, and to any other files that belong to `path`. The result must
        be deterministic."""
        raise NotImplementedError

    def as_read(self, documents: Documents) -> list[list[int]]:
        """Return the documents as the format reads them."""
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
        index = self.format.index(str(path), read, storage=storage or make_storage())
        assert index.blocks.dtype == BLOCK_DTYPE
        return dataclasses.replace(index, blocks=place_blocks(index.blocks))

    def open(
        self,
        path: Path | str,
        found: FileIndex,
        size: int | None = None,
        *,
        storage: Storage | None = None,
    ) -> BlockReader:
        """Open an indexed file, which had `size` bytes when it was indexed (None for its current
        size)."""
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
        """Return the ReadSpec that a file is indexed with."""
        return ReadSpec(
            format=self.format.name,
            column=column,
            count_documents=documents,
            block_bytes=self.block_bytes,
            options=make_options(self.options),
        )
