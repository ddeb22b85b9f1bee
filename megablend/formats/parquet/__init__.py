"""Parquet, by page: a block is a data page of the token column, read and decoded by itself."""

from __future__ import annotations

from collections.abc import Sequence

from megablend.config.read_spec import ReadSpec
from megablend.errors import CorruptFileError, UnsupportedFileError
from megablend.formats.base import (
    BlockReader,
    FileIndex,
    OpenedFile,
    changed_error,
    check_size,
    check_structure,
)
from megablend.formats.flat import DOCUMENTS, ColumnFormat, read_divided
from megablend.formats.parquet.decoding.page_reader import ParquetReader
from megablend.formats.parquet.indexing.index_file import index_file
from megablend.formats.parquet.metadata.footer import read_footer_bytes
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.storage.base import Storage
from megablend.system.digest import hex_digest


class ParquetFormat(ColumnFormat):
    """The format of Parquet files; see `Format`."""

    name = "parquet"
    suffixes: Sequence[str] = (".parquet", ".parq", ".pq")
    documents_known: bool = False
    kernel_modules: Sequence[str] = (
        "parquet.page_headers",
        "parquet.levels",
        "parquet.values",
        "parquet.bodies",
    )
    has_row_groups: bool = True

    def index(self, path: str, read: ReadSpec, *, storage: Storage) -> FileIndex:
        """Find the pages of a file and count their tokens. Pages are as large as their writer made
        them, regardless of `block_bytes`."""
        return self.divide(path, read, index_file(path, read, storage), storage)

    def index_part(
        self, path: str, read: ReadSpec, *, span: tuple[int, int], storage: Storage
    ) -> FileIndex:
        """Find the pages of the column chunks that begin within bytes [start, stop); see
        `DivisibleFormat`."""
        return index_file(path, read, storage, span=span)

    def open(
        self, path: str, column: str | None, file: OpenedFile, *, storage: Storage
    ) -> BlockReader:
        """Return a reader of an indexed file, after checking its size and its footer."""
        source = FileBytes(path, storage, check_size(path, file.size, storage))
        try:
            digest = hex_digest(read_footer_bytes(source))
        except (CorruptFileError, UnsupportedFileError) as error:
            raise changed_error(path, error) from error
        check_structure(path, digest, file, "footer")
        meta = dict(file.meta)
        meta.pop(DOCUMENTS, None)
        return read_divided(path, file.meta, ParquetReader(source, Column.from_meta(meta)))


PARQUET = ParquetFormat()
