"""The kernel that reads a column's chunks from a footer against the slow reader: it says the same, or leaves the footer alone."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.formats.parquet.metadata import column_chunk
from megablend.formats.parquet.metadata.column_chunk import column_chunks
from megablend.formats.parquet.metadata.footer import Footer, parse_footer, read_footer
from megablend.formats.parquet.metadata.schema import Column, leaves
from megablend.formats.parquet.metadata.source import FileBytes
from megablend.formats.parquet.metadata.thrift import MalformedError, UnsupportedError
from megablend.storage.local import LocalStorage

GOLDEN = sorted((Path(__file__).parent.parent.parent.parent / "golden").glob("*.parquet"))


def footer_of(path: Path) -> Footer:
    return read_footer(FileBytes(str(path), LocalStorage(), path.stat().st_size))


def columns_of(footer: Footer) -> list[Column]:
    return list(leaves(footer.schema))


def taken(footer: Footer, column: Column, num_leaves: int) -> bool:
    return column_chunk._parse_in_kernel(footer, column, num_leaves) is not None


def outcome(footer: Footer, column: Column, num_leaves: int) -> list[object] | str:
    try:
        chunks: list[object] = column_chunks(footer, column, num_leaves).tolist()
    except (MalformedError, UnsupportedError) as error:
        return str(error)
    return chunks


def slowly(
    footer: Footer, column: Column, num_leaves: int, monkeypatch: pytest.MonkeyPatch
) -> list[object] | str:
    with monkeypatch.context() as patch:
        patch.setattr(column_chunk, "_parse_in_kernel", lambda *_: None)
        return outcome(footer, column, num_leaves)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_what_writers_write_is_read_alike(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    footer = footer_of(path)
    columns = columns_of(footer)
    for column in columns:
        found = outcome(footer, column, len(columns))
        assert not isinstance(found, str)
        assert found == slowly(footer, column, len(columns), monkeypatch)
        # fastparquet writes file_path, if only an empty one
        assert taken(footer, column, len(columns)) or path.name.startswith("fastparquet")
    assert "has" in outcome(footer, columns[0], len(columns) + 1)


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
def test_damaged_footers_are_left_alone_or_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    seen = {"alike": 0, "left alone": 0}
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
            assert outcome(changed, column, len(columns)) == slowly(
                changed, column, len(columns), monkeypatch
            )
            seen["alike" if taken(changed, column, len(columns)) else "left alone"] += 1
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
    assert taken(footer, column, 1)
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
        assert taken(footer, column, 1)
        other = replace(column, path=(*column.path[:-1], "other"))
        assert not taken(footer, other, 1)
        with pytest.raises(
            MalformedError, match=f"row group 0 has a different column instead of '{column.name}'"
        ):
            column_chunks(footer, other, 1)
