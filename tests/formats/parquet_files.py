"""Parquet files made by hand, field by field, and a check of what is read from any file against the rows that were written."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megablend.formats.base import (
    ENDS_AT_DOCUMENT_END,
    HAS_EARLIER_TOKENS,
    STARTS_MID_DOCUMENT,
    FileIndex,
)
from megablend.formats.parquet.metadata.thrift import Kind
from megablend.storage.base import Storage
from tests.formats.thrift_writer import write_struct
from tests.formats.writers import index, opened, pieces
from tests.storages import STORAGE

Rows = Sequence[Sequence[int | None] | int | None]
Fields = list[tuple[int, Kind, object]]


def documents_of(rows: Rows) -> list[list[int]]:
    """Tokens by document: without nulls."""
    lists = [row if isinstance(row, Sequence) else [row] for row in rows]
    return [[value for value in row if value is not None] for row in lists]


def check(
    path: Path, rows: Rows, column: str | None = None, *, storage: Storage = STORAGE
) -> FileIndex:
    """Index with and without documents, read all blocks in a shuffled order with repeats, compare all that the index says."""
    documents = documents_of(rows)
    tokens = [token for document in documents for token in document]
    plain = index(path, column, documents=False, storage=storage)
    read = pieces(opened(path, column, plain, storage=storage), plain.blocks, plain.chunks)
    assert [token for block in read for piece in block for token in piece] == tokens

    found = index(path, column, storage=storage)
    assert (found.rows, found.tokens) == (len(rows), len(tokens)) == (plain.rows, plain.tokens)
    order = random.Random(0).choices(range(len(found.blocks)), k=2 * len(found.blocks))
    decoded = pieces(
        opened(path, column, found, storage=storage), found.blocks[order], found.chunks
    )
    blocks = dict(zip(order, decoded, strict=True))
    rest = [i for i in range(len(found.blocks)) if i not in blocks]
    blocks |= dict(
        zip(
            rest,
            pieces(opened(path, column, found, storage=storage), found.blocks[rest], found.chunks),
            strict=True,
        )
    )
    assert _joined(found, [blocks[i] for i in range(len(found.blocks))]) == documents
    assert (
        found.blocks["first_token"].tolist()
        == [0, *np.cumsum(found.blocks["tokens"])[:-1]][: len(found.blocks)]
    )
    assert (np.diff(found.blocks["offset"]) > 0).all()
    return found


def _joined(found: FileIndex, read: list[list[list[int]]]) -> list[list[int]]:
    documents: list[list[int]] = []
    is_open = False
    for block, parts in zip(found.blocks, read, strict=True):
        flags = block["flags"]
        assert bool(flags & STARTS_MID_DOCUMENT) == is_open
        assert bool(flags & HAS_EARLIER_TOKENS) == (is_open and bool(documents[-1]))
        assert block["tokens"] == sum(map(len, parts))
        assert block["rows"] == len(parts) - is_open
        ends = 0
        for i, part in enumerate(parts):
            if i == 0 and is_open:
                documents[-1] += part
            else:
                documents.append(part)
            ends += bool(documents[-1]) and (
                i + 1 < len(parts) or bool(flags & ENDS_AT_DOCUMENT_END)
            )
        assert block["ends"] == ends
        is_open = not flags & ENDS_AT_DOCUMENT_END
    assert not is_open
    return documents


def hybrid(levels: Sequence[int], width: int) -> bytes:
    """Levels in runs of equal ones."""
    out = bytearray()
    for begin in range(len(levels)):
        if begin == 0 or levels[begin] != levels[begin - 1]:
            end = next(
                (i for i in range(begin, len(levels)) if levels[i] != levels[begin]), len(levels)
            )
            header = (end - begin) << 1
            while header >= 0x80:
                out.append(header & 0x7F | 0x80)
                header >>= 7
            out += bytes([header, *levels[begin].to_bytes((width + 7) // 8, "little")])
    return bytes(out)


def prefixed(data: bytes) -> bytes:
    """V1 levels: their size before them."""
    return len(data).to_bytes(4, "little") + data


def page(
    kind: int,
    body: bytes,
    fields: Fields,
    *,
    decoded: int | None = None,
    crc: int | None = None,
    padding: int = 0,
) -> bytes:
    """A page: header and body. `padding` bytes of an unknown field make the header long."""
    if crc is None:
        crc = zlib.crc32(body)
    crc -= (crc >> 31) << 32
    field = {0: 5, 2: 7, 3: 8}[kind]
    header: Fields = [
        (1, Kind.I32, kind),
        (2, Kind.I32, len(body) if decoded is None else decoded),
        (3, Kind.I32, len(body)),
        (4, Kind.I32, crc),
        (field, Kind.STRUCT, write_struct(fields)),
    ]
    if padding:
        header.append((15, Kind.BINARY, bytes(padding)))
    return write_struct(header) + body


def data_page(
    body: bytes,
    num_values: int,
    *,
    encoding: int = 0,
    levels: int = 3,
    decoded: int | None = None,
    crc: int | None = None,
    padding: int = 0,
) -> bytes:
    """A V1 data page."""
    fields: Fields = [
        (1, Kind.I32, num_values),
        (2, Kind.I32, encoding),
        (3, Kind.I32, levels),
        (4, Kind.I32, levels),
    ]
    return page(0, body, fields, decoded=decoded, crc=crc, padding=padding)


def data_page_v2(
    rep: bytes,
    definition: bytes,
    values: bytes,
    num_values: int,
    num_rows: int,
    *,
    decoded_values: int | None = None,
    encoding: int = 0,
) -> bytes:
    """A V2 data page, is_compressed left out."""
    fields: Fields = [
        (1, Kind.I32, num_values),
        (2, Kind.I32, 0),
        (3, Kind.I32, num_rows),
        (4, Kind.I32, encoding),
        (5, Kind.I32, len(definition)),
        (6, Kind.I32, len(rep)),
    ]
    size = len(rep) + len(definition) + (len(values) if decoded_values is None else decoded_values)
    return page(3, rep + definition + values, fields, decoded=size)


def dictionary_page(values: Sequence[int]) -> bytes:
    """A PLAIN dictionary of int32."""
    return page(
        2, np.array(values, "<i4").tobytes(), [(1, Kind.I32, len(values)), (2, Kind.I32, 0)]
    )


def element(name: str, repetition: int | None = None, **fields: object) -> bytes:
    """A SchemaElement; keywords: type, children, converted."""
    ids = {"type": 1, "children": 5, "converted": 6}
    given: Fields = [(ids[key], Kind.I32, value) for key, value in fields.items()]
    if repetition is not None:
        given.append((3, Kind.I32, repetition))
    return write_struct(sorted([*given, (4, Kind.BINARY, name.encode())]))


FLAT = [element("schema", children=1), element("ids", 1, type=1)]
REQUIRED = [element("schema", children=1), element("ids", 0, type=1)]
LIST = [
    element("schema", children=1),
    element("ids", 1, children=1, converted=3),
    element("list", 2, children=1),
    element("element", 1, type=1),
]
"""Levels: 0 null list, 1 empty, 2 null element, 3 token."""


def write(
    path: Path,
    pages: Sequence[bytes],
    *,
    num_values: int,
    num_rows: int,
    schema: Sequence[bytes] = FLAT,
    names: Sequence[str] = ("ids",),
    codec: int = 0,
    data_offset: int = 4,
    meta: Fields | None = None,
    chunk: Fields | None = None,
    footer: Fields | None = None,
    file_rows: int | None = None,
    hole: int = 0,
) -> Path:
    """A file of one row group and one column; `meta`, `chunk` and `footer` are added to those structs.

    `hole` bytes without disk space lie before the pages; `data_offset` has to be larger by as many.
    """
    body = b"".join(pages)
    column: Fields = [
        (1, Kind.I32, 1),
        (2, Kind.LIST, (Kind.I32, [0])),
        (3, Kind.LIST, (Kind.BINARY, [name.encode() for name in names])),
        (4, Kind.I32, codec),
        (5, Kind.I64, num_values),
        (6, Kind.I64, len(body)),
        (7, Kind.I64, len(body)),
        (9, Kind.I64, data_offset),
        *(meta or []),
    ]
    parts: Fields = [(2, Kind.I64, 4), (3, Kind.STRUCT, write_struct(column)), *(chunk or [])]
    columns = [write_struct(sorted(parts, key=lambda field: field[0]))]
    group: Fields = [
        (1, Kind.LIST, (Kind.STRUCT, columns)),
        (2, Kind.I64, len(body)),
        (3, Kind.I64, num_rows),
    ]
    file: Fields = [
        (1, Kind.I32, 1),
        (2, Kind.LIST, (Kind.STRUCT, list(schema))),
        (3, Kind.I64, num_rows if file_rows is None else file_rows),
        (4, Kind.LIST, (Kind.STRUCT, [write_struct(group)])),
        *(footer or []),
    ]
    data = write_struct(file)
    with path.open("wb") as stream:
        stream.write(b"PAR1")
        stream.seek(hole, 1)
        stream.write(body + data + len(data).to_bytes(4, "little") + b"PAR1")
    return path


LIST_NAMES = ("ids", "list", "element")
