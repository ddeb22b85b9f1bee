"""Parse the chunks of one column in the footer: a kernel parses all row groups in one pass."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.metadata.checks import refuse
from megablend.formats.parquet.metadata.footer import Footer
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.thrift import (
    Kind,
    MalformedError,
    Structs,
    UnsupportedError,
    write_varint,
)
from megablend.kernels.parquet.footer import (
    CHUNK_DTYPE,
    COUNTS,
    NUM_CHUNK_SLOTS,
    SLOTS,
    find_chunks,
)

Chunks = npt.NDArray[np.void]
"""CHUNK_DTYPE [num_chunks]: the chunks of a column, whose bytes are known to precede the footer."""
_THRIFT_NAMES = {
    "physical": "type",
    "path": "path_in_schema",
    "decoded_bytes": "total_uncompressed_size",
    "stored_bytes": "total_compressed_size",
    "data_page": "data_page_offset",
    "dictionary_page": "dictionary_page_offset",
    "page_encodings": "encoding_stats",
    "sizes": "size_statistics",
    "levels": "definition_level_histogram",
    "offset_index": "offset_index_offset",
    "offset_index_bytes": "offset_index_length",
    "column_index": "column_index_offset",
    "column_index_bytes": "column_index_length",
}
"""The names of fields in parquet.thrift that have another name here."""


def column_chunks(footer: Footer, column: Column, num_leaves: int) -> Chunks:
    """Parse the metadata of a column's chunks, one for each row group: CHUNK_DTYPE
    [num_row_groups]. The schema has `num_leaves` columns.
    Raises: MalformedError, UnsupportedError."""
    groups = footer.row_groups
    values = np.empty((len(groups), NUM_CHUNK_SLOTS), np.int64)
    names = [name.encode() for name in column.path]
    # As Thrift encodes the elements of a list of strings
    path = b"".join(write_varint(len(name)) + name for name in names)
    group, slot, kind, value = find_chunks(
        np.frombuffer(footer.data, np.uint8),
        groups.start if isinstance(groups, Structs) else 0,
        column.ordinal,
        num_leaves,
        np.frombuffer(path, np.uint8),
        len(names),
        values,
    )
    if group < len(groups):
        _complain(footer, column, num_leaves, group, slot, kind, value)
    chunks: Chunks = values.view(CHUNK_DTYPE)[:, 0]
    _check_bytes(chunks, footer.offset)
    rows = int(chunks["num_rows"].sum())
    if rows != footer.num_rows:
        raise MalformedError(f"num_rows is {footer.num_rows}, but the row groups have {rows}")
    return chunks


def _complain(
    footer: Footer, column: Column, num_leaves: int, group: int, slot: int, kind: int, value: int
) -> NoReturn:
    """Raise the error for a row group, given the results of `find_chunks`. Raises: MalformedError,
    UnsupportedError."""
    columns = footer.row_groups[group].structs(1, f"columns of row group {group}")
    if slot < 0:
        # Reading them in Python tells what is wrong, unless it is only unusual
        list(columns)
        raise MalformedError(f"row group {group} has metadata that cannot be read")
    name = SLOTS[slot]
    if name in ("crypto_metadata", "encrypted_metadata"):
        raise UnsupportedError(f"the column is encrypted (row group {group}); decrypt the file")
    if name == "file_path":
        other = columns[column.ordinal].text(1, name)
        raise UnsupportedError(
            f"row group {group} is stored in another file ({other}); specify the files that hold data"
        )
    if name == "columns" and kind == Kind.LIST:
        problem = f"has {value} columns, but the schema has {num_leaves}"
        raise MalformedError(f"row group {group} {problem}")
    if name == "path" and kind == Kind.LIST:
        raise MalformedError(f"row group {group} has a different column instead of {column.name!r}")
    problem = "is of the wrong type"
    if not kind:
        problem = "is missing"
    elif Kind.I8 <= kind <= Kind.I64 and name in COUNTS:
        problem = f"is {value}, expected 0 to 2**48"
    raise MalformedError(f"{_THRIFT_NAMES.get(name, name)} of row group {group} {problem}")


def _check_bytes(chunks: Chunks, limit: int) -> None:
    """Set the field `start` of chunks, and check that all bytes of the chunks and of their page
    indexes are before byte `limit`. Raises: MalformedError."""
    # Some writers omit dictionary_page_offset, or set it to 0, and write the dictionary's offset as
    # data_page_offset
    starts = chunks["start"]
    starts[:] = chunks["data_page"]
    dictionaries = chunks["dictionary_page"]
    np.copyto(starts, dictionaries, where=(dictionaries > 0) & (dictionaries < starts))
    stops = starts + chunks["stored_bytes"]
    refuse(
        (chunks["num_values"] > 0) & ~((starts > 0) & (starts < stops) & (stops <= limit)),
        lambda i: (
            f"row group {i} has bytes {starts[i]} to {stops[i]}, but the footer begins at {limit}"
        ),
    )
    _check_index(chunks, "offset_index", limit)
    _check_index(chunks, "column_index", limit)


def _check_index(chunks: Chunks, name: str, limit: int) -> None:
    begins = chunks[name]
    sizes = chunks[f"{name}_bytes"]
    sizes[begins < 0] = 0
    ends = begins + sizes
    refuse(
        (sizes > 0) & (ends > limit),
        lambda i: f"{name} has bytes {begins[i]} to {ends[i]}, but the footer begins at {limit}",
    )
