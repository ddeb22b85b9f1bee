"""How pages are found and counted, and what is read for it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.formats.base import ENDS_AT_DOCUMENT_END, HAS_EARLIER_TOKENS, STARTS_MID_DOCUMENT
from megablend.formats.parquet.indexing.count import PAGE_DTYPE, blocks_of
from megablend.formats.parquet.metadata.page_index import (
    ColumnIndexes,
    OffsetIndexes,
    parse_column_indexes,
    parse_offset_indexes,
)
from megablend.formats.parquet.metadata.thrift import Kind, MalformedError
from tests.examples import examples
from tests.formats.parquet_files import Rows, check
from tests.formats.thrift_writer import write_struct
from tests.formats.writers import index
from tests.pyarrow_versions import needs_pyarrow

LISTS = pa.list_(pa.int32())
FULL: Rows = [[1, 2, 3]] * 90
EMPTIES: Rows = [[1, 2, 3], [], None] * 30
NULLS: Rows = [[1, None, 3], [None], []] * 30


def store(
    path: Path,
    rows: Rows,
    kind: pa.DataType = LISTS,
    *,
    version: str = "1.0",
    page_index: bool = True,
) -> Path:
    pq.write_table(
        pa.table({"ids": pa.array(rows, kind)}),
        path,
        use_dictionary=False,
        data_page_size=60,
        write_batch_size=5,
        row_group_size=50,
        data_page_version=version,
        write_page_index=page_index,
        compression="zstd",
    )
    return path


@needs_pyarrow(20, "histograms of levels")
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize(
    ("rows", "page_index", "documents", "scans", "knows"),
    [
        (FULL, True, True, False, True),
        (FULL, True, False, False, True),
        (FULL, False, True, True, True),
        (FULL, False, False, False, False),
        (EMPTIES, True, True, False, True),
        (EMPTIES, True, False, False, True),
        (EMPTIES, False, False, True, True),
        (NULLS, True, True, True, True),
        (NULLS, True, False, False, False),
    ],
)
def test_the_levels_are_read_only_where_nothing_else_tells(
    tmp_path: Path,
    rows: Rows,
    page_index: bool,
    documents: bool,
    scans: bool,
    knows: bool,
    version: str,
) -> None:
    path = store(tmp_path / "x.parquet", rows, version=version, page_index=page_index)
    check(path, rows)
    found = index(path, None, documents=documents)
    assert bool(found.scanned_bytes) == scans
    assert (found.blocks["rows"] >= 0).all() == (found.blocks["ends"] >= 0).all() == knows
    assert (found.blocks["rows"] == -1).all() == (not knows)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("page_index", [False, True])
def test_flat_columns_without_nulls_are_never_scanned(
    tmp_path: Path, version: str, page_index: bool
) -> None:
    path = store(
        tmp_path / "x.parquet", list(range(300)), pa.int32(), version=version, page_index=page_index
    )
    assert check(path, list(range(300)), "ids").scanned_bytes == 0


def test_flat_columns_with_nulls_are_counted_by_the_column_index(tmp_path: Path) -> None:
    rows: Rows = [None if i % 3 == 0 else i for i in range(300)]
    assert check(store(tmp_path / "x.parquet", rows, pa.int32()), rows, "ids").scanned_bytes == 0


def test_the_same_file_gives_the_same_index(tmp_path: Path) -> None:
    path = store(tmp_path / "x.parquet", NULLS)
    first = index(path, None)
    second = index(path, None)
    assert first.blocks.tobytes() == second.blocks.tobytes()
    assert first.chunks.tobytes() == second.chunks.tobytes()
    assert (first.structure, first.meta) == (second.structure, second.meta)


def test_chunks_know_where_they_begin(tmp_path: Path) -> None:
    found = index(store(tmp_path / "x.parquet", NULLS), None)
    assert found.chunks["first_row"].tolist() == [0, 50]
    assert found.chunks["first_token"].tolist() == [0, 34]
    assert found.chunks["row_group"].tolist() == [0, 1]
    assert found.chunks["dictionary_offset"].tolist() == [-1, -1]


@examples(150)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sets(st.integers(1, 36), max_size=6)
)
def test_documents_are_followed_over_pages(lengths: list[int], cuts: set[int]) -> None:
    # One slot more than tokens: a null ends each row, so that a page may hold nothing but the end of a long row.
    slots = [
        (row, is_token)
        for row, length in enumerate(lengths)
        for is_token in [True] * length + [False]
    ]
    last_slot = {row: i for i, (row, _) in enumerate(slots)}
    bounds = [0, *sorted(cut for cut in cuts if cut < len(slots)), len(slots)]
    pages = np.zeros(len(bounds) - 1, PAGE_DTYPE)
    expected: list[tuple[int, int]] = []
    for page, begin, end in zip(pages, bounds[:-1], bounds[1:], strict=True):
        rows = sorted({row for row, _ in slots[begin:end]})
        tokens = [sum(is_token for r, is_token in slots[begin:end] if r == row) for row in rows]
        continues = begin > 0 and slots[begin - 1][0] == rows[0]
        begun = tokens[continues:]
        page["tokens"] = sum(tokens)
        page["rows"] = len(begun)
        page["continues"] = continues
        page["head"] = tokens[0] if continues else 0
        page["inner"] = sum(map(bool, begun[:-1]))
        page["tail"] = begun[-1] if begun else 0
        ends = sum(last_slot[row] < end and lengths[row] > 0 for row in rows)
        carries = continues and any(is_token for r, is_token in slots[:begin] if r == rows[0])
        expected.append(
            (
                ends,
                STARTS_MID_DOCUMENT * continues
                | ENDS_AT_DOCUMENT_END * (last_slot[rows[-1]] < end)
                | HAS_EARLIER_TOKENS * carries,
            )
        )
    found, _ = blocks_of(pages, np.array([0, len(pages)]))
    assert found[["ends", "flags"]].tolist() == expected
    # and where another chunk comes before
    pages = np.concatenate((pages, pages))
    found, first_tokens = blocks_of(pages, np.array([0, len(pages) // 2, len(pages)]))
    assert found[["ends", "flags"]].tolist() == expected * 2
    assert found["first_token"].tolist() == (np.cumsum(pages["tokens"]) - pages["tokens"]).tolist()
    assert first_tokens.tolist() == [0, sum(lengths), 2 * sum(lengths)]
    assert found["chunk"].tolist() == [0] * len(expected) + [1] * len(expected)


def offset_index(*places: tuple[int, int, int]) -> bytes:
    structs = [
        write_struct([(1, Kind.I64, a), (2, Kind.I32, b), (3, Kind.I64, c)]) for a, b, c in places
    ]
    return write_struct([(1, Kind.LIST, (Kind.STRUCT, structs))])


def parse_places(
    chunks: list[bytes], starts: list[int], limit: int, num_rows: list[int]
) -> OffsetIndexes:
    ends = np.cumsum([len(chunk) for chunk in chunks])
    begins = ends - [len(chunk) for chunk in chunks]
    data = np.frombuffer(b"".join(chunks), np.uint8)
    return parse_offset_indexes(
        data,
        begins,
        ends,
        starts=np.array(starts),
        limit=limit,
        num_rows=np.array(num_rows, np.int64),
    )


GOOD = offset_index((50, 5, 0), (60, 5, 4))


def test_offset_indexes() -> None:
    chunks = [offset_index((10, 5, 0), (20, 7, 3), (27, 1, 3)), GOOD]
    found = parse_places(chunks, [4, 30], 65, [9, 10])
    assert found.first_page.tolist() == [0, 3, 5]
    assert (found.offsets.tolist(), found.sizes.tolist()) == ([10, 20, 27, 50, 60], [5, 7, 1, 5, 5])
    assert found.rows.tolist() == [3, 0, 6, 4, 6]
    second = found.of(np.array([False, True]))
    assert (second.first_page.tolist(), second.offsets.tolist(), second.rows.tolist()) == (
        [0, 2],
        [50, 60],
        [4, 6],
    )


@pytest.mark.parametrize(
    "places", [[(10, 5, 1)], [(10, 5, 0), (20, 5, 99)], [(10, 5, 0), (15, 5, 7), (20, 5, 6)]]
)
def test_first_rows_that_do_not_ascend_are_not_believed(places: list[tuple[int, int, int]]) -> None:
    """ClickHouse up to 25.6 counts the elements of lists in place of rows."""
    found = parse_places([GOOD, offset_index(*places), GOOD], [30, 4, 30], 65, [10, 9, 10])
    assert found.rows.tolist() == [4, 6, *[-1] * len(places), 4, 6]
    assert found.offsets.tolist() == [50, 60, *(place[0] for place in places), 50, 60]


@pytest.mark.parametrize(
    ("places", "match"),
    [
        ([(3, 5, 0)], "outside their column chunk, bytes 4 to 28"),
        ([(20, 20, 0)], "outside their column chunk"),
        ([(10, 11, 0), (20, 5, 1)], "overlap"),
        ([(20, 5, 0), (10, 5, 1)], "overlap"),
        ([(10, 5, 0), (20, -5, 2)], "compressed_page_size is -5"),
        ([(10, 1 << 31, 0)], "a page of 2147483648 bytes is larger"),
        ([], "it lists no pages for 9 rows"),
    ],
)
def test_an_offset_index_that_lies(places: list[tuple[int, int, int]], match: str) -> None:
    before = offset_index((4, 5, 0), (9, 5, 2))
    after = offset_index((11, 1, 0))
    with pytest.raises(MalformedError, match=match) as caught:
        parse_places([before, before, offset_index(*places), after], [4, 4, 4, 4], 28, [5, 5, 9, 5])
    assert caught.value.item == 2


def parse_counts(chunks: list[bytes]) -> ColumnIndexes:
    """Of chunks of two pages each, whose column has definition levels up to 3."""
    ends = np.cumsum([len(chunk) for chunk in chunks])
    begins = ends - [len(chunk) for chunk in chunks]
    data = np.frombuffer(b"".join(chunks), np.uint8)
    first_page = np.arange(len(chunks) + 1) * 2
    return parse_column_indexes(data, begins, ends, first_page=first_page, max_def=3)


def column_index(definition: list[int]) -> bytes:
    return write_struct([(7, Kind.LIST, (Kind.I64, definition))])


def test_column_indexes() -> None:
    nulls = write_struct([(5, Kind.LIST, (Kind.I64, [8, 9]))])
    found = parse_counts([column_index([1, 2, 3, 4, 5, 6, 7, 8]), b"", nulls])
    assert found.has_levels.tolist() == [True, False, False]
    assert found.has_nulls.tolist() == [False, False, True]
    assert found.levels.T.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], *[[0] * 4] * 4]
    assert found.nulls.tolist() == [0, 0, 0, 0, 8, 9]
    last = found.of(np.array([False, False, True]), np.array([0, 2, 4, 6]))
    assert (last.has_nulls.tolist(), last.nulls.tolist(), last.levels.shape) == (
        [True],
        [8, 9],
        (4, 2),
    )


@pytest.mark.parametrize(
    ("definition", "match"),
    [
        ([1, 2, 3], "3 counts, expected 4 for each of 2 pages"),
        ([1, 2, 3, 4, 1, 1, 1, -1], "negative"),
    ],
)
def test_a_column_index_that_lies(definition: list[int], match: str) -> None:
    good = column_index([1, 2, 3, 4, 1, 1, 1, 1])
    with pytest.raises(MalformedError, match=match) as caught:
        parse_counts([good, column_index(definition), good])
    assert caught.value.item == 1
