"""The kernel that reads a column's chunks from a footer, against a reader that reads field by field, and against pyarrow."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.formats.parquet.metadata.column_chunk import column_chunks
from megablend.formats.parquet.metadata.footer import Footer, parse_footer, read_footer
from megablend.formats.parquet.metadata.schema import Column, leaves
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import MalformedError, Struct, UnsupportedError
from megablend.kernels.parquet.footer import CHUNK_DTYPE
from megablend.storage.local import LocalStorage
from tests.formats.parquet.metadata.odd_thrift import Odd, Reader

UNSIGNED = (1 << 64) - 1
GOLDEN = sorted((Path(__file__).parent.parent.parent.parent / "golden").glob("*.parquet"))


def footer_of(path: Path) -> Footer:
    return read_footer(FileBytes(str(path), LocalStorage(), path.stat().st_size))


def columns_of(footer: Footer) -> list[Column]:
    return list(leaves(footer.schema))


def outcome(footer: Footer, column: Column, num_leaves: int) -> list[object] | str:
    try:
        chunks: list[object] = column_chunks(footer, column, num_leaves).tolist()
    except (MalformedError, UnsupportedError) as error:
        return str(error)
    return chunks


def slowly(footer: Footer, column: Column) -> list[object]:
    """The chunks of a column as CHUNK_DTYPE describes them."""
    chunks = np.zeros(len(footer.row_groups), CHUNK_DTYPE)
    for number, group in enumerate(footer.row_groups):
        chunk = group.structs(1, "columns")[column.ordinal]
        meta = chunk.struct(3, "meta_data")
        statistics = meta.struct(12, "statistics") if 12 in meta else Struct({})
        sizes = meta.struct(16, "size_statistics") if 16 in meta else Struct({})
        levels = list_of(sizes, 3)
        data_page = meta.integer(9, "data_page_offset")
        dictionary = meta.integer(11, "dictionary_page_offset", 0)
        offset_index = chunk.integer(4, "offset_index_offset", -1)
        column_index = chunk.integer(6, "column_index_offset", -1)
        page_encodings = -1
        if 13 in meta:
            data_pages = [
                pages
                for pages in meta.structs(13, "encoding_stats")
                if pages.integer(1, "page_type") in (0, 3)
            ]
            page_encodings = bits([pages.integer(2, "encoding") for pages in data_pages])
        values = [as_number(statistics._fields.get(field)) for field in (1, 2, 5, 6)]
        chunks[number] = (
            number,
            dictionary if 0 < dictionary < data_page else data_page,
            group.integer(3, "num_rows"),
            meta.integer(1, "type"),
            bits(list_of(meta, 2)) & UNSIGNED,
            meta.integer(4, "codec"),
            meta.integer(5, "num_values"),
            meta.integer(6, "total_uncompressed_size"),
            meta.integer(7, "total_compressed_size"),
            data_page,
            dictionary,
            statistics.integer(3, "null_count", -1),
            ranges_of(statistics),
            *values,
            page_encodings & UNSIGNED,
            len(levels) if 3 in sizes else -1,
            sum(levels),
            levels[-1] if levels else 0,
            offset_index,
            0 if offset_index < 0 else chunk.integer(5, "offset_index_length", 0),
            column_index,
            0 if column_index < 0 else chunk.integer(7, "column_index_length", 0),
        )
    found: list[object] = chunks.tolist()
    return found


def list_of(struct: Struct, field: int) -> list[int]:
    values: Any = struct._fields.get(field, [])
    return list(values)


def bits(encodings: list[int]) -> int:
    return sum({1 << (value if 0 <= value < 63 else 63) for value in encodings})


def as_number(value: object) -> int:
    if isinstance(value, bytes) and len(value) in (4, 8):
        return int.from_bytes(value, "little")
    return 0


def ranges_of(statistics: Struct) -> int:
    ranges = 0
    for field in (1, 2, 5, 6):
        value = statistics._fields.get(field)
        if isinstance(value, bytes) and len(value) in (4, 8):
            ranges |= 1 << (field if len(value) == 4 else field + 8)
    for field in (7, 8):
        ranges |= (statistics._fields.get(field) is False) << field
    return ranges


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_what_writers_write_is_read_as_field_by_field(path: Path) -> None:
    footer = footer_of(path)
    columns = columns_of(footer)
    for column in columns:
        assert outcome(footer, column, len(columns)) == slowly(footer, column)
    assert "columns, but the schema has" in outcome(footer, columns[0], len(columns) + 1)


@pytest.mark.parametrize(
    "how", ["has_long_ids", "has_long_lists", "has_unknown_fields", "is_shuffled"]
)
def test_odd_footers_are_read_as_others_are(how: str) -> None:
    """Whatever Thrift allows: other writers than today's may write it."""
    for path in GOLDEN:
        footer = footer_of(path)
        odd = Odd()
        setattr(odd, how, True)
        again = parse_footer(odd.struct(Reader(footer.data).struct()), footer.offset)
        columns = columns_of(footer)
        assert columns_of(again) == columns
        for column in columns:
            found = outcome(again, column, len(columns))
            assert found == outcome(footer, column, len(columns)), path


def test_pyarrow_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    ids = pa.array([[1, 2, None], [], None, [4]] * 50, pa.list_(pa.int32()))
    table = pa.table({"a": np.arange(200), "ids": ids, "b": np.arange(200) / 3})
    pq.write_table(
        table,
        path,
        row_group_size=30,
        write_page_index=True,
        compression={"ids": "zstd", "a": "none"},
    )
    footer = footer_of(path)
    column = columns_of(footer)[1]
    found = column_chunks(footer, column, 3)
    meta = pq.read_metadata(path)
    assert len(found) == meta.num_row_groups == 7
    for chunk, group in zip(found, map(meta.row_group, range(7)), strict=True):
        theirs = group.column(1)
        assert (chunk["num_rows"], chunk["num_values"]) == (group.num_rows, theirs.num_values)
        assert chunk["start"] == theirs.dictionary_page_offset
        assert (chunk["stored_bytes"], chunk["decoded_bytes"]) == (
            theirs.total_compressed_size,
            theirs.total_uncompressed_size,
        )
        assert ".".join(column.path) == theirs.path_in_schema
        assert chunk["null_count"] == theirs.statistics.null_count
        assert (chunk["offset_index_bytes"] > 0) == theirs.has_offset_index
        assert (chunk["column_index_bytes"] > 0) == theirs.has_column_index


@pytest.mark.long
def test_damaged_footers_are_refused_or_read_as_field_by_field() -> None:
    chance = random.Random(5)
    seen = {"read": 0, "refused": 0}
    for name in (
        "pyarrow26_dictionary_pages",
        "pyarrow26_small_pages_v2_indexed",
        "duckdb_lists_zstd_v2",
    ):
        footer = footer_of(GOLDEN[0].with_name(f"{name}.parquet"))
        columns = columns_of(footer)
        for _ in range(700):
            data = bytearray(footer.data)
            for _ in range(chance.randrange(1, 3)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            try:
                changed = parse_footer(bytes(data), footer.offset)
            except (MalformedError, UnsupportedError):
                continue
            column = chance.choice(columns)
            found = outcome(changed, column, len(columns))
            if isinstance(found, str):
                seen["refused"] += 1
                continue
            assert found == slowly(changed, column)
            seen["read"] += 1
    assert min(seen.values()) > 50, seen


def test_metadata_of_any_size(tmp_path: Path) -> None:
    """Key-value metadata (ARROW:schema among it) is passed over."""
    path = tmp_path / "x.parquet"
    table = pa.table({"ids": [[1, 2], [3]]}).replace_schema_metadata(
        {"long": "x" * 3_000_000, **{str(i): "" for i in range(3000)}}
    )
    pq.write_table(table, path)
    footer = footer_of(path)
    (column,) = columns_of(footer)
    assert column_chunks(footer, column, 1)["num_rows"].tolist() == [2]


def test_a_path_of_any_length_is_compared(tmp_path: Path) -> None:
    """Lists of up to 14 elements have their length in four bits, longer ones in bytes of their own."""
    for depth in (1, 14, 15, 40):
        path = tmp_path / f"{depth}.parquet"
        array = pa.array([1, 2], pa.int32())
        for i in range(depth - 1):
            array = pa.StructArray.from_arrays([array], [f"é{i}"])
        pq.write_table(pa.table({"ids": array}), path)
        footer = footer_of(path)
        (column,) = columns_of(footer)
        assert len(column.path) == depth
        assert len(column_chunks(footer, column, 1)) == 1
        other = replace(column, path=(*column.path[:-1], "other"))
        with pytest.raises(
            MalformedError, match=f"row group 0 has a different column instead of '{column.name}'"
        ):
            column_chunks(footer, other, 1)
