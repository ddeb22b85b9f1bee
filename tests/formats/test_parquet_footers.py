"""The kernel that reads a column's chunks from a footer against the slow reader: it says the same, or leaves the footer alone."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megablend.formats.parquet import column_chunk
from megablend.formats.parquet.column_chunk import ColumnChunk, column_chunks
from megablend.formats.parquet.footer import Footer, parse_footer, read_footer
from megablend.formats.parquet.schema import leaves
from megablend.formats.parquet.source import ByteSource
from megablend.formats.parquet.thrift import MalformedError, UnsupportedError
from megablend.storage import LocalStorage

GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*.parquet"))


def footer_of(path: Path) -> Footer:
    return read_footer(ByteSource(str(path), LocalStorage(), path.stat().st_size))


def taken(footer: Footer, ordinal: int, num_leaves: int) -> bool:
    return column_chunk._found_at_once(footer, ordinal, num_leaves) is not None


def outcome(footer: Footer, ordinal: int, num_leaves: int) -> list[ColumnChunk] | str:
    try:
        return column_chunks(footer, ordinal, num_leaves)
    except (MalformedError, UnsupportedError) as error:
        return str(error)


def slowly(footer: Footer, ordinal: int, num_leaves: int, monkeypatch: pytest.MonkeyPatch) -> list[ColumnChunk] | str:
    with monkeypatch.context() as patch:
        patch.setattr(column_chunk, "_found_at_once", lambda *_: None)
        return outcome(footer, ordinal, num_leaves)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_what_writers_write_is_read_alike(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    footer = footer_of(path)
    num_leaves = len(list(leaves(footer.schema)))
    for ordinal in range(num_leaves):
        found = outcome(footer, ordinal, num_leaves)
        assert not isinstance(found, str)
        assert found == slowly(footer, ordinal, num_leaves, monkeypatch)
        # fastparquet writes file_path, if only an empty one
        assert taken(footer, ordinal, num_leaves) or path.name.startswith("fastparquet")
    assert "has" in outcome(footer, 0, num_leaves + 1)


def test_pyarrow_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    ids = pa.array([[1, 2, None], [], None, [4]] * 50, pa.list_(pa.int32()))
    table = pa.table({"a": np.arange(200), "ids": ids, "b": np.arange(200) / 3})
    pq.write_table(table, path, row_group_size=30, write_page_index=True, compression={"ids": "zstd", "a": "none"})
    found = column_chunks(footer_of(path), 1, 3)
    meta = pq.read_metadata(path)
    assert len(found) == meta.num_row_groups == 7
    for chunk, group in zip(found, map(meta.row_group, range(7)), strict=True):
        theirs = group.column(1)
        assert (chunk.num_rows, chunk.num_values) == (group.num_rows, theirs.num_values)
        assert chunk.start == theirs.dictionary_page_offset
        assert (chunk.stored_bytes, chunk.decoded_bytes) == (
            theirs.total_compressed_size,
            theirs.total_uncompressed_size,
        )
        assert ".".join(chunk.path) == theirs.path_in_schema
        assert chunk.null_count == theirs.statistics.null_count
        assert (chunk.offset_index is not None) == theirs.has_offset_index
        assert (chunk.column_index is not None) == theirs.has_column_index


def test_damaged_footers_are_left_alone_or_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    seen = {"alike": 0, "left alone": 0}
    for name in ("pyarrow26_dictionary_pages", "pyarrow26_small_pages_v2_indexed", "duckdb_lists_zstd_v2"):
        footer = footer_of(GOLDEN[0].with_name(f"{name}.parquet"))
        num_leaves = len(list(leaves(footer.schema)))
        for _ in range(700):
            data = bytearray(footer.data)
            for _ in range(chance.randrange(1, 3)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            try:
                changed = parse_footer(bytes(data), footer.offset)
            except (MalformedError, UnsupportedError):
                continue
            ordinal = chance.randrange(num_leaves)
            assert outcome(changed, ordinal, num_leaves) == slowly(changed, ordinal, num_leaves, monkeypatch)
            seen["alike" if taken(changed, ordinal, num_leaves) else "left alone"] += 1
    assert min(seen.values()) > 50, seen


def test_metadata_of_any_size(tmp_path: Path) -> None:
    """Key-value metadata (ARROW:schema among it) is passed over."""
    path = tmp_path / "x.parquet"
    table = pa.table({"ids": [[1, 2], [3]]}).replace_schema_metadata(
        {"long": "x" * 3_000_000, **{str(i): "" for i in range(3000)}}
    )
    pq.write_table(table, path)
    assert taken(footer_of(path), 0, 1)
    assert [chunk.num_rows for chunk in column_chunks(footer_of(path), 0, 1)] == [2]
