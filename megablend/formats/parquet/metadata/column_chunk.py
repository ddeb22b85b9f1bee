"""Parse the chunks of one column in the footer.

A kernel parses all row groups in one pass. If it rejects them, they are parsed in Python, which
reports what is wrong.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megablend.formats.parquet.metadata.footer import Footer
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.thrift import (
    Kind,
    MalformedError,
    Struct,
    Structs,
    UnsupportedError,
    write_varint,
)
from megablend.kernels.parquet.footer import ABSENT, CHUNK_DTYPE, NUMBERED, find_chunks

Chunks = npt.NDArray[np.void]
"""CHUNK_DTYPE [num_chunks]: the chunks of a column, whose bytes are known to precede the footer."""

_OTHER = 1 << NUMBERED
"""The bit that stands for all encodings without a bit of their own."""


def column_chunks(footer: Footer, column: Column, num_leaves: int) -> Chunks:
    """Parse the metadata of a column's chunks, one for each row group: CHUNK_DTYPE
    [num_row_groups]. The schema has `num_leaves` columns.
    Raises: MalformedError, UnsupportedError."""
    chunks = _parse_in_kernel(footer, column, num_leaves)
    if chunks is None:
        chunks = _parse_in_python(footer, column, num_leaves)
    rows = int(chunks["num_rows"].sum())
    if rows != footer.num_rows:
        raise MalformedError(f"num_rows is {footer.num_rows}, but the row groups have {rows}")
    return chunks


def _parse_in_kernel(footer: Footer, column: Column, num_leaves: int) -> Chunks | None:
    """Parse the chunks of a column, CHUNK_DTYPE [num_row_groups], by a kernel; return None if
    anything is unusual or damaged."""
    groups = footer.row_groups
    if not isinstance(groups, Structs):
        return None
    chunks = np.zeros(len(groups), CHUNK_DTYPE)
    data = np.frombuffer(footer.data, np.uint8)
    path = np.frombuffer(_path_bytes(column), np.uint8)
    done = find_chunks(data, groups.start, column.ordinal, num_leaves, path, footer.offset, chunks)
    return chunks if done else None


def _path_bytes(column: Column) -> bytes:
    """Return the column's path as Thrift encodes it: a list of strings."""
    names = [name.encode() for name in column.path]
    # A length below 15 is in the upper four bits of the first byte, not in a byte of its own
    head = bytes([min(len(names), 15) << 4 | Kind.BINARY])
    if len(names) >= 15:
        head += write_varint(len(names))
    return head + b"".join(write_varint(len(name)) + name for name in names)


def _parse_in_python(footer: Footer, column: Column, num_leaves: int) -> Chunks:
    """Parse the chunks of a column, CHUNK_DTYPE [num_row_groups], field by field. Raises:
    MalformedError, UnsupportedError."""
    chunks = np.zeros(len(footer.row_groups), CHUNK_DTYPE)
    for number, group in enumerate(footer.row_groups):
        columns = group.structs(1, f"columns of row group {number}")
        if len(columns) != num_leaves:
            raise MalformedError(
                f"row group {number} has {len(columns)} columns, but the schema has {num_leaves}"
            )
        fields = _parse_chunk(columns[column.ordinal], number, column)
        fields["num_rows"] = group.count(3, "num_rows of a row group")
        fields["row_group"] = number
        _check_bytes(fields, footer.offset)
        for name, value in fields.items():
            chunks[number][name] = value
    return chunks


def _parse_chunk(chunk: Struct, row_group: int, column: Column) -> dict[str, int]:
    """Return the fields of CHUNK_DTYPE for a column chunk. Raises: MalformedError,
    UnsupportedError."""
    if 8 in chunk or 9 in chunk:
        raise UnsupportedError(f"the column is encrypted (row group {row_group}); decrypt the file")
    if 1 in chunk and chunk.text(1, "file_path"):
        raise UnsupportedError(
            f"row group {row_group} is stored in another file ({chunk.text(1, 'file_path')})"
        )
    meta = chunk.struct(3, "meta_data of a column chunk")
    statistics = meta.struct(12, "statistics") if 12 in meta else Struct({})
    sizes = meta.struct(16, "size_statistics") if 16 in meta else Struct({})
    levels = sizes.integers(3, "definition_level_histogram") if 3 in sizes else None
    fields = {
        "physical": meta.integer(1, "type"),
        "codec": meta.integer(4, "codec"),
        "encodings": _bits(meta.integers(2, "encodings")),
        "page_encodings": _page_encodings(meta),
        "num_values": meta.count(5, "num_values"),
        "data_page": meta.count(9, "data_page_offset"),
        "dictionary_page": meta.integer(11, "dictionary_page_offset", 0),
        "stored_bytes": meta.count(7, "total_compressed_size"),
        "decoded_bytes": meta.count(6, "total_uncompressed_size"),
        "null_count": statistics.count(3, "null_count") if 3 in statistics else -1,
        **_value_statistics(statistics),
        "num_levels": -1 if levels is None else len(levels),
        "all_levels": min(max(sum(levels or ()), -1), 1 << 62),
        "top_level": levels[-1] if levels else 0,
        "offset_index": chunk.count(4, "offset_index_offset") if 4 in chunk else -1,
        "offset_index_bytes": chunk.count(5, "offset_index_length", 0),
        "column_index": chunk.count(6, "column_index_offset") if 6 in chunk else -1,
        "column_index_bytes": chunk.count(7, "column_index_length", 0),
    }
    if tuple(meta.texts(3, "path_in_schema")) != column.path:
        raise MalformedError(
            f"row group {row_group} has a different column instead of {column.name!r}"
        )
    return fields


def _value_statistics(statistics: Struct) -> dict[str, int]:
    """Return the fields of CHUNK_DTYPE for the smallest and largest values of a chunk."""
    fields = {"old_max": 0, "old_min": 0, "max_value": 0, "min_value": 0}
    ranges = 0
    for name, field in zip(fields, (1, 2, 5, 6), strict=True):
        data = statistics.binary(field)
        if data is not None and len(data) in (4, 8):
            fields[name] = int.from_bytes(data, "little")
            ranges |= 1 << (field if len(data) == 4 else field + 8)
    # is_max_value_exact, is_min_value_exact
    for field in (7, 8):
        ranges |= (statistics.is_false(field)) << field
    return {**fields, "ranges": ranges}


def _page_encodings(meta: Struct) -> int:
    """Return the bits of the encodings of data pages, according to encoding_stats, or ABSENT if the
    writer stored none."""
    if 13 not in meta:
        return int(ABSENT)
    stats = meta.structs(13, "encoding_stats")
    # Data pages, V1 and V2
    data_pages = [pages for pages in stats if pages.integer(1, "page_type") in (0, 3)]
    return _bits([pages.integer(2, "encoding") for pages in data_pages])


def _bits(encodings: list[int]) -> int:
    bits = 0
    for encoding in encodings:
        bits |= 1 << encoding if 0 <= encoding < NUMBERED else _OTHER
    return bits


def _check_bytes(fields: dict[str, int], limit: int) -> None:
    """Set `start` in the fields of a chunk, and check that all bytes of the chunk and its page
    index are before byte `limit`. Raises: MalformedError."""
    # Some writers omit dictionary_page_offset, or set it to 0, and write the dictionary's offset as
    # data_page_offset
    start = fields["data_page"]
    data = fields["data_page"]
    dictionary = fields["dictionary_page"]
    if 0 < dictionary < data:
        start = dictionary
    stop = start + fields["stored_bytes"]
    if fields["num_values"] and not 0 < start < stop <= limit:
        raise MalformedError(
            f"row group {fields['row_group']} has bytes {start} to {stop}, but the footer begins at {limit}"
        )
    fields["start"] = start
    for name in ("offset_index", "column_index"):
        begin = fields[name]
        size = fields[f"{name}_bytes"]
        if begin < 0:
            fields[f"{name}_bytes"] = 0
        elif size and begin + size > limit:
            raise MalformedError(
                f"{name} has bytes {begin} to {begin + size}, but the footer begins at {limit}"
            )
