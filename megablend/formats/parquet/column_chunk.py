"""The chunks of one column, as the footer describes them.

A kernel reads all row groups in one pass. What it leaves alone is read slowly, which names what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from megablend.formats.parquet.footer import Footer
from megablend.formats.parquet.thrift import (
    MAX_COUNT,
    Kind,
    MalformedError,
    Struct,
    Structs,
    UnsupportedError,
    read_struct,
)
from megablend.kernels.footer import ABSENT, FOUND_DTYPE, Found, find_chunks

_COUNTS = (
    "num_rows",
    "num_values",
    "decoded_bytes",
    "stored_bytes",
    "data_page",
    "offset_index_bytes",
    "column_index_bytes",
)
_OPTIONAL = ("offset_index", "column_index", "null_count")
"""-1 where absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChunk:
    """One column's part of a row group."""

    row_group: int
    num_rows: int
    physical: int
    path: tuple[str, ...]
    codec: int
    encodings: tuple[int, ...]
    """Of values and levels, all pages together; ascending."""
    page_encodings: tuple[int, ...] | None
    """Value encodings of the data pages, ascending; None where the writer does not tell."""
    num_values: int
    """Levels: nulls and empty lists included."""
    start: int
    """First byte of the first page, dictionary included."""
    stored_bytes: int
    decoded_bytes: int
    null_count: int | None
    level_histogram: tuple[int, int] | None
    """How many counts of levels by definition level there are, and the last of them."""
    offset_index: tuple[int, int] | None
    """Offset and size."""
    column_index: tuple[int, int] | None
    """Offset and size."""


def column_chunks(footer: Footer, ordinal: int, num_leaves: int) -> list[ColumnChunk]:
    """The chunks of leaf number `ordinal` of `num_leaves`, a row group each. Raises MalformedError, UnsupportedError."""
    found = _found_at_once(footer, ordinal, num_leaves)
    facts = _read_slowly(footer, ordinal, num_leaves) if found is None else _facts_of(found, footer.data)
    chunks = [_chunk(number, fact, footer.offset) for number, fact in enumerate(facts)]
    rows = sum(chunk.num_rows for chunk in chunks)
    if rows != footer.num_rows:
        raise MalformedError(f"num_rows is {footer.num_rows}, but the row groups have {rows}")
    return chunks


def _found_at_once(footer: Footer, ordinal: int, num_leaves: int) -> Found | None:
    """FOUND_DTYPE [num_row_groups], as a kernel reads it; None where anything is unusual or damaged."""
    groups = footer.row_groups
    if not isinstance(groups, Structs):
        return None
    found = np.zeros(len(groups), FOUND_DTYPE)
    if not find_chunks(np.frombuffer(footer.data, np.uint8), groups.start, ordinal, num_leaves, found):
        return None
    if any((found[name] < 0).any() for name in _COUNTS):
        return None
    return None if any((found[name] > MAX_COUNT).any() for name in _COUNTS + _OPTIONAL) else found


def _facts_of(found: Found, footer: bytes) -> Iterator[dict[str, Any]]:
    """What the kernel found of each chunk, by name."""
    names = FOUND_DTYPE.names or ()
    paths: dict[bytes, tuple[str, ...]] = {}
    for row in found.tolist():
        fact = dict(zip(names, row, strict=True))
        written = footer[fact.pop("path") : fact.pop("path_end")]
        if written not in paths:  # thousands of row groups have the same
            alone, _ = read_struct(bytes([1 << 4 | Kind.LIST]) + written + b"\0")
            paths[written] = tuple(alone.texts(1, "path_in_schema"))
        absent = fact["page_encodings"] == int(ABSENT)
        yield fact | {
            "path": paths[written],
            "encodings": _bits(fact["encodings"]),
            "page_encodings": None if absent else _bits(fact["page_encodings"]),
        }


@cache
def _bits(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def _read_slowly(footer: Footer, ordinal: int, num_leaves: int) -> Iterator[dict[str, Any]]:
    """The same, read field by field. Raises MalformedError, UnsupportedError."""
    for number, group in enumerate(footer.row_groups):
        columns = group.structs(1, f"columns of row group {number}")
        if len(columns) != num_leaves:
            raise MalformedError(f"row group {number} has {len(columns)} columns, the schema {num_leaves}")
        yield _facts_in(columns[ordinal], number) | {"num_rows": group.count(3, "num_rows of a row group")}


def _facts_in(chunk: Struct, row_group: int) -> dict[str, Any]:
    if 8 in chunk or 9 in chunk:
        raise UnsupportedError(f"the column is encrypted (row group {row_group}); decrypt the file")
    if 1 in chunk and chunk.text(1, "file_path"):
        raise UnsupportedError(f"row group {row_group} lies in another file ({chunk.text(1, 'file_path')})")
    meta = chunk.struct(3, "meta_data of a column chunk")
    statistics = meta.struct(12, "statistics") if 12 in meta else Struct({})
    sizes = meta.struct(16, "size_statistics") if 16 in meta else Struct({})
    levels = sizes.integers(3, "definition_level_histogram") if 3 in sizes else None
    return {
        "physical": meta.integer(1, "type"),
        "path": tuple(meta.texts(3, "path_in_schema")),
        "codec": meta.integer(4, "codec"),
        "encodings": tuple(sorted(set(meta.integers(2, "encodings")))),
        "page_encodings": _page_encodings(meta),
        "num_values": meta.count(5, "num_values"),
        "data_page": meta.count(9, "data_page_offset"),
        "dictionary_page": meta.integer(11, "dictionary_page_offset", 0),
        "stored_bytes": meta.count(7, "total_compressed_size"),
        "decoded_bytes": meta.count(6, "total_uncompressed_size"),
        "null_count": statistics.count(3, "null_count") if 3 in statistics else -1,
        "num_levels": -1 if levels is None else len(levels),
        "top_level": levels[-1] if levels else 0,
        "offset_index": chunk.count(4, "offset_index_offset") if 4 in chunk else -1,
        "offset_index_bytes": chunk.count(5, "offset_index_length", 0),
        "column_index": chunk.count(6, "column_index_offset") if 6 in chunk else -1,
        "column_index_bytes": chunk.count(7, "column_index_length", 0),
    }


def _page_encodings(meta: Struct) -> tuple[int, ...] | None:
    if 13 not in meta:
        return None
    stats = meta.structs(13, "encoding_stats")
    return tuple(sorted({s.integer(2, "encoding") for s in stats if s.integer(1, "page_type") in (0, 3)}))


def _chunk(row_group: int, fact: dict[str, Any], limit: int) -> ColumnChunk:
    """A chunk of which all lies before byte `limit`. Raises MalformedError."""
    # Some writers leave dictionary_page_offset out or 0 and let data_page_offset name the dictionary.
    start = fact["dictionary_page"] if 0 < fact["dictionary_page"] < fact["data_page"] else fact["data_page"]
    stop = start + fact["stored_bytes"]
    if fact["num_values"] and not 0 < start < stop <= limit:
        raise MalformedError(f"row group {row_group} claims bytes {start} to {stop}, the footer begins at {limit}")
    return ColumnChunk(
        row_group=row_group,
        num_rows=fact["num_rows"],
        physical=fact["physical"],
        path=fact["path"],
        codec=fact["codec"],
        encodings=fact["encodings"],
        page_encodings=fact["page_encodings"],
        num_values=fact["num_values"],
        start=start,
        stored_bytes=fact["stored_bytes"],
        decoded_bytes=fact["decoded_bytes"],
        null_count=None if fact["null_count"] < 0 else fact["null_count"],
        level_histogram=None if fact["num_levels"] < 0 else (fact["num_levels"], fact["top_level"]),
        offset_index=_place("offset_index", fact, limit),
        column_index=_place("column_index", fact, limit),
    )


def _place(name: str, fact: dict[str, Any], limit: int) -> tuple[int, int] | None:
    offset, size = fact[name], fact[f"{name}_bytes"]
    if offset < 0 or not size:
        return None
    if offset + size > limit:
        raise MalformedError(f"{name} claims bytes {offset} to {offset + size}, the footer begins at {limit}")
    return offset, size
