"""Token files: Parquet files with the tokens of a part's documents, and the place of each document
in the text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megablend.errors import CorruptFileError
from megablend.storage.base import Storage
from megablend.text.documents import Portion
from megablend.text.engine import Tokens
from megablend.text.tables import open_file, reporting_damage

LAYOUT = 1
"""The version of the columns of token files, and of their names (`Setup.name_part`)."""
FOOTER = b"megablend.text"
"""The key of megablend's own metadata in the Parquet footer of a token file."""
_REMEDY = "remove it and build again"
_PAGE_BYTES = 64 << 10
_ENCODINGS = {
    "tokens.list.element": "BYTE_STREAM_SPLIT",
    "offset": "DELTA_BINARY_PACKED",
    "line": "DELTA_BINARY_PACKED",
}


class TokenFileWriter:
    """A writer of a token file, with a row group for each portion of documents. If an error occurs
    before `close`, the file lacks megablend's own footer."""

    def __init__(self, path: Path, *, has_keys: bool) -> None:
        import pyarrow.parquet as pq  # few processes need it, and it takes some 50 ms

        item = pa.field("element", pa.int32(), nullable=False)
        fields = [
            pa.field("tokens", pa.list_(item), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("line", pa.int32(), nullable=False),
        ]
        if has_keys:
            fields.append(pa.field("key", pa.string()))
        self._schema = pa.schema(fields)
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            data_page_size=_PAGE_BYTES,
            use_dictionary=False,
            write_page_index=True,
            write_page_checksum=True,
            column_encoding=_ENCODINGS,
        )

    def write(self, portion: Portion, tokens: Tokens) -> None:
        """Write the documents of a portion as a row group."""
        ends = np.cumsum(tokens.counts)
        offsets = np.concatenate(([0], ends)).astype(np.int32)
        lists = pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(tokens.ids), type=self._schema.field("tokens").type
        )
        columns = [lists, portion.offsets, portion.lines.astype(np.int32)]
        if len(self._schema) > len(columns):
            columns.append(pa.array(portion.keys, pa.string()))
        self.write_table(pa.table(columns, schema=self._schema))

    def write_table(self, table: Any) -> None:
        """Write the rows of a pyarrow table as a row group."""
        self._writer.write_table(table, table.num_rows or 1)  # pyarrow refuses groups of 0 rows

    def close(self, footer: Mapping[str, Any]) -> None:
        """Finish the file by writing megablend's own footer."""
        self._writer.add_key_value_metadata({FOOTER: json.dumps(footer, sort_keys=True)})
        self._writer.close()

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def open_token_file(storage: Storage, path: str) -> Any:
    """Open a token file to read its columns. Raises: MissingFileError; CorruptFileError."""
    import pyarrow.parquet as pq  # few processes need it, and it takes some 50 ms

    size = storage.stat(path).size
    with reporting_damage(path, _REMEDY):
        return pq.ParquetFile(open_file(storage, path, size))


def read_columns(storage: Storage, path: str, names: Sequence[str]) -> Any:
    """Read columns of a token file. Names that the file does not have are ignored. Raises: see
    `open_token_file`."""
    file = open_token_file(storage, path)
    with reporting_damage(path, _REMEDY):
        return file.read(columns=names)


def read_footer(storage: Storage, path: str) -> dict[str, Any]:
    """Return megablend's own footer of a token file, as `work._make_footer` made it. Raises: see
    `open_token_file`."""
    metadata = open_token_file(storage, path).metadata.metadata or {}
    try:
        footer = json.loads(metadata.get(FOOTER, b""))
    except ValueError:
        footer = None
    if not isinstance(footer, dict):
        raise CorruptFileError(path, f"has no footer of a token file; {_REMEDY}")
    return footer


def copy_token_file(storage: Storage, path: str, to: Path, made_from: Mapping[str, Any]) -> None:
    """Write a copy of a token file, for another text file with the same lines.

    Args:
        made_from: the items of the footer that describe the other text file.

    Raises: the same errors as `open_token_file`.
    """
    file = open_token_file(storage, path)
    with TokenFileWriter(to, has_keys="key" in file.schema_arrow.names) as writer:
        for group in range(file.num_row_groups):
            with reporting_damage(path, _REMEDY):
                table = file.read_row_group(group)
            writer.write_table(table)
        writer.close({**read_footer(storage, path), **made_from})
