"""Read and parse the footer: schema and row groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megablend.errors import CorruptFileError, UnsupportedFileError
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import Struct, UnsupportedError, read_struct
from megablend.storage.head_and_tail import TAIL_BYTES
from megablend.storage.prefetched import request_tail
from megablend.system.digest import hex_digest

MAGIC = b"PAR1"
ENCRYPTED_MAGIC = b"PARE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """The parsed footer of a file (FileMetaData). Row groups are parsed later, by `column_chunks`,
    for one column."""

    digest: str
    """The digest of the footer's bytes, which identifies a file's structure."""
    offset: int
    """Offset of the footer's first byte; all pages are before it."""
    num_rows: int
    schema: Sequence[Struct]
    row_groups: Sequence[Struct]
    data: bytes
    """The bytes of the footer."""


def read_footer_bytes(source: FileBytes) -> bytes:
    """Read the bytes of a file's footer. Raises: CorruptFileError, UnsupportedFileError
    (encrypted)."""
    path = source.path
    if source.size == 0:
        raise CorruptFileError(path, "the file is empty; rewrite or re-download it")
    tail_bytes = min(source.size, TAIL_BYTES)
    if source.is_prefetched:
        tail_bytes = request_tail(source.storage, source.path, source.size)
    tail = source.read(source.size - tail_bytes, tail_bytes, "the file's end")
    if tail[-4:] == ENCRYPTED_MAGIC:
        raise UnsupportedFileError(
            path, "the footer is encrypted (PARE); decrypt the file", offset=source.size - 4
        )
    if source.size < 12 or tail[-4:] != MAGIC:
        evidence = f"it has {source.size} bytes"
        if tail[-4:] != MAGIC:
            evidence = f"it ends with {tail[-4:]!r}, not {MAGIC!r}"
        problem = f"not a complete Parquet file: {evidence}; rewrite or re-download it"
        raise CorruptFileError(path, problem, offset=max(0, source.size - 4))
    size = int.from_bytes(tail[-8:-4], "little")
    if not 0 < size <= source.size - 12:
        before = source.size - 12
        problem = f"the footer's length is {size}, but there are only {before} bytes before it; rewrite or re-download the file"
        raise CorruptFileError(path, problem, offset=source.size - 8)
    if size + 8 <= len(tail):
        return tail[-8 - size : -8]
    return source.read(source.size - 8 - size, size, "the footer")


def read_footer(source: FileBytes) -> Footer:
    """Read a file's footer. Raises: CorruptFileError, UnsupportedFileError (encrypted)."""
    data = read_footer_bytes(source)
    offset = source.size - 8 - len(data)
    with source.error_context(offset, "the footer"):
        return parse_footer(data, offset)


def parse_footer(data: bytes, offset: int) -> Footer:
    """Parse FileMetaData that begins at `offset` in its file. Raises: MalformedError,
    UnsupportedError (encrypted)."""
    meta, _ = read_struct(data)
    if 8 in meta:
        raise UnsupportedError(
            "its columns are encrypted (encryption_algorithm is set); decrypt the file"
        )
    return Footer(
        digest=hex_digest(data),
        offset=offset,
        num_rows=meta.count(3, "num_rows"),
        schema=meta.structs(2, "schema"),
        row_groups=meta.structs(4, "row_groups"),
        data=data,
    )
