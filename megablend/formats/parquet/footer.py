"""The footer: schema, row groups and, for one column, its chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from megablend.errors import CorruptFileError, UnsupportedFileError
from megablend.formats.parquet.source import ByteSource
from megablend.formats.parquet.thrift import MalformedError, Struct, UnsupportedError, read_struct

MAGIC = b"PAR1"
ENCRYPTED_MAGIC = b"PARE"
TAIL_BYTES = 64 << 10
"""Read at once from the end of a file: most footers fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChunk:
    """One column's part of a row group."""

    row_group: int
    num_rows: int
    physical: int
    path: tuple[str, ...]
    codec: int
    encodings: tuple[int, ...]
    """Of values and levels, all pages together."""
    page_encodings: tuple[int, ...] | None
    """Value encodings of the data pages; None where the writer does not tell."""
    num_values: int
    """Levels: nulls and empty lists included."""
    start: int
    """First byte of the first page, dictionary included."""
    stored_bytes: int
    decoded_bytes: int
    null_count: int | None
    level_histogram: tuple[int, ...] | None
    """Levels by definition level."""
    offset_index: tuple[int, int] | None
    """Offset and size."""
    column_index: tuple[int, int] | None
    """Offset and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """FileMetaData, read but for its columns, which `column_chunks` reads."""

    digest: str
    offset: int
    """First byte of the footer: pages lie before it."""
    num_rows: int
    schema: Sequence[Struct]
    row_groups: Sequence[Struct]


def read_footer_bytes(source: ByteSource) -> bytes:
    """Find a file's footer. Raises CorruptFileError, UnsupportedFileError (encrypted)."""
    path = source.path
    if source.size == 0:
        raise CorruptFileError(path, "the file is empty; write it again or fetch it anew")
    tail = source.read(max(0, source.size - TAIL_BYTES), min(source.size, TAIL_BYTES), "the file's end")
    if tail[-4:] == ENCRYPTED_MAGIC:
        raise UnsupportedFileError(path, "the footer is encrypted (PARE); decrypt the file", offset=source.size - 4)
    if source.size < 12 or tail[-4:] != MAGIC:
        found = f"it ends with {tail[-4:]!r}, not {MAGIC!r}" if tail[-4:] != MAGIC else f"it has {source.size} bytes"
        problem = f"not a whole Parquet file: {found}; write it again or fetch it anew"
        raise CorruptFileError(path, problem, offset=max(0, source.size - 4))
    size = int.from_bytes(tail[-8:-4], "little")
    if not 0 < size <= source.size - 12:
        problem = f"the footer's length is {size}, but {source.size - 12} bytes lie before it"
        raise CorruptFileError(path, problem, offset=source.size - 8)
    if size + 8 <= len(tail):
        return tail[-8 - size : -8]
    return source.read(source.size - 8 - size, size, "the footer")


def digest_of(footer: bytes) -> str:
    """What tells one file's structure from another's: hex, 16 bytes."""
    return hashlib.blake2b(footer, digest_size=16).hexdigest()


def read_footer(source: ByteSource) -> Footer:
    """Read a file's footer. Raises CorruptFileError, UnsupportedFileError (encrypted)."""
    data = read_footer_bytes(source)
    offset = source.size - 8 - len(data)
    with source.blamed(offset, "the footer"):
        return parse_footer(data, offset)


def parse_footer(data: bytes, offset: int) -> Footer:
    """Parse FileMetaData that lies at `offset` of its file. Raises MalformedError, UnsupportedError (encrypted)."""
    meta, _ = read_struct(data)
    if 8 in meta:
        raise UnsupportedError("its columns are encrypted (encryption_algorithm is set); decrypt the file")
    footer = Footer(
        digest=digest_of(data),
        offset=offset,
        num_rows=meta.count(3, "num_rows"),
        schema=meta.structs(2, "schema"),
        row_groups=list(meta.structs(4, "row_groups")),
    )
    rows = sum(group.count(3, "num_rows of a row group") for group in footer.row_groups)
    if rows != footer.num_rows:
        raise MalformedError(f"num_rows is {footer.num_rows}, but the row groups have {rows}")
    return footer


def column_chunks(footer: Footer, ordinal: int, num_leaves: int) -> list[ColumnChunk]:
    """The chunks of leaf number `ordinal` of `num_leaves`. Raises MalformedError, UnsupportedError."""
    chunks = []
    for number, group in enumerate(footer.row_groups):
        columns = group.structs(1, f"columns of row group {number}")
        if len(columns) != num_leaves:
            raise MalformedError(f"row group {number} has {len(columns)} columns, the schema {num_leaves}")
        chunks.append(_column_chunk(columns[ordinal], number, group.count(3, "num_rows"), footer.offset))
    return chunks


def _column_chunk(chunk: Struct, row_group: int, num_rows: int, limit: int) -> ColumnChunk:
    if 8 in chunk or 9 in chunk:
        raise UnsupportedError(f"the column is encrypted (row group {row_group}); decrypt the file")
    if 1 in chunk and chunk.text(1, "file_path"):
        raise UnsupportedError(f"row group {row_group} lies in another file ({chunk.text(1, 'file_path')})")
    meta = chunk.struct(3, "meta_data of a column chunk")
    data_offset = meta.count(9, "data_page_offset")
    dictionary_offset = meta.integer(11, "dictionary_page_offset", 0)
    # Some writers leave dictionary_page_offset out or 0 and let data_page_offset name the dictionary.
    start = dictionary_offset if 0 < dictionary_offset < data_offset else data_offset
    statistics = meta.struct(12, "statistics") if 12 in meta else Struct({})
    sizes = meta.struct(16, "size_statistics") if 16 in meta else Struct({})
    result = ColumnChunk(
        row_group=row_group,
        num_rows=num_rows,
        physical=meta.integer(1, "type"),
        path=tuple(meta.texts(3, "path_in_schema")),
        codec=meta.integer(4, "codec"),
        encodings=tuple(meta.integers(2, "encodings")),
        page_encodings=_page_encodings(meta),
        num_values=meta.count(5, "num_values"),
        start=start,
        stored_bytes=meta.count(7, "total_compressed_size"),
        decoded_bytes=meta.count(6, "total_uncompressed_size"),
        null_count=statistics.count(3, "null_count") if 3 in statistics else None,
        level_histogram=tuple(sizes.integers(3, "definition_level_histogram")) if 3 in sizes else None,
        offset_index=_place(chunk, 4, "offset_index", limit),
        column_index=_place(chunk, 6, "column_index", limit),
    )
    if result.num_values and not 0 < start < start + result.stored_bytes <= limit:
        raise MalformedError(
            f"row group {row_group} claims bytes {start} to {start + result.stored_bytes}, the footer begins at {limit}"
        )
    return result


def _page_encodings(meta: Struct) -> tuple[int, ...] | None:
    if 13 not in meta:
        return None
    stats = meta.structs(13, "encoding_stats")
    return tuple(sorted({s.integer(2, "encoding") for s in stats if s.integer(1, "page_type") in (0, 3)}))


def _place(chunk: Struct, field: int, name: str, limit: int) -> tuple[int, int] | None:
    if field not in chunk:
        return None
    offset, size = chunk.count(field, f"{name}_offset"), chunk.count(field + 1, f"{name}_length", 0)
    if not size:
        return None
    if offset + size > limit:
        raise MalformedError(f"{name} claims bytes {offset} to {offset + size}, the footer begins at {limit}")
    return offset, size
