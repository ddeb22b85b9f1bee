"""Pages that are counted by their page indexes, and their sums by chunk, against rows counted one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.arrays import running_totals
from megablend.formats.parquet.indexing.chunk_pages import ChunkPages, without_empty
from megablend.formats.parquet.indexing.chunks import _check_sums
from megablend.formats.parquet.indexing.count import PAGE_DTYPE, count_from_page_index
from megablend.formats.parquet.metadata.page_index import ColumnIndexes, OffsetIndexes
from megablend.formats.parquet.metadata.schema import Column
from megablend.formats.parquet.metadata.thrift import MalformedError
from tests.examples import examples

SETTINGS = examples(150)
ROWS = st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4), max_size=5)
CHUNK_DTYPE = np.dtype(
    [
        (name, "<i8")
        for name in (
            *("decoded_bytes", "stored_bytes", "num_rows", "num_values"),
            *("num_levels", "all_levels", "top_level", "null_count"),
        )
    ]
)


def column(max_rep: int, max_def: int, slot_def: int) -> Column:
    return Column(
        name="ids",
        path=("ids",),
        ordinal=0,
        physical=1,
        dtype="int32",
        max_def=max_def,
        max_rep=max_rep,
        slot_def=slot_def,
    )


def counted(
    chunks: list[list[list[list[int | None] | None]]],
    *,
    documents: bool,
    change: tuple[int, int, int] = (0, 0, 0),
) -> tuple[npt.NDArray[np.void], int]:
    """Pages of rows, as page indices have them: the numbers of nulls, empty lists, null elements and tokens; `change` is a
    level, a page, and by how much its number is wrong."""
    pages = [page for chunk in chunks for page in chunk]
    levels = np.zeros((4, len(pages)), np.int64)
    for i, page in enumerate(pages):
        for row in page:
            if not row:
                levels[0 if row is None else 1, i] += 1
            for element in row or []:
                levels[2 if element is None else 3, i] += 1
    rows = np.array([len(page) for page in pages], np.int64)
    levels[change[:2]] += change[2]
    numbers = np.arange(len(pages))
    kinds = np.arange(len(chunks))
    stored = np.zeros(len(chunks), CHUNK_DTYPE)
    stored["decoded_bytes"] = kinds + 1
    stored["stored_bytes"] = 3
    known = np.ones(len(chunks), np.bool_)
    return count_from_page_index(
        OffsetIndexes(np.cumsum([0, *map(len, chunks)]), numbers * 100, numbers * 10, rows),
        ColumnIndexes(known, known, np.zeros_like(rows), levels),
        column(1, 3, 2),
        stored,
        kinds,
        documents=documents,
    )


@SETTINGS
@given(st.lists(st.lists(ROWS, min_size=1, max_size=4), min_size=1, max_size=3), st.booleans())
def test_pages_are_counted_as_their_rows_are(
    chunks: list[list[list[list[int | None] | None]]], documents: bool
) -> None:
    pages, num_uncertain = counted(chunks, documents=documents)
    assert num_uncertain == sum(
        any(None in (row or []) for row in page) for chunk in chunks for page in chunk
    )
    i = 0
    for number, chunk in enumerate(chunks):
        has_nulls = [any(None in (row or []) for row in page) for page in chunk]
        for page, scan in zip(chunk, has_nulls, strict=True):
            found = pages[i]
            assert found["tokens"] == sum(
                element is not None for row in page for element in row or []
            )
            assert found["rows"] == (len(page) if documents or not any(has_nulls) else -1)
            assert found["scan"] == scan
            if not scan:
                assert found["inner"] == sum(bool(row) for row in page)
            assert (found["offset"], found["stored_bytes"], found["encoding"]) == (
                i * 100,
                i * 10,
                number,
            )
            assert found["decoded_bytes"] == -(-i * 10 * (number + 1) // 3)
            assert not any(found[name] for name in ("continues", "head", "tail"))
            i += 1


@pytest.mark.parametrize(
    ("rows", "change"), [([None], (0, 1, 1)), ([[]], (0, 1, 1)), ([[3], []], (1, 1, -1))]
)
def test_counts_that_cannot_be(
    rows: list[list[int | None] | None], change: tuple[int, int, int]
) -> None:
    """A null more than it has rows; or a token less than it has rows with tokens."""
    chunks: list[list[list[list[int | None] | None]]] = [[[[1, 2]]], [rows, [[4], [5]]]]
    with pytest.raises(MalformedError, match="more nulls than rows, or fewer tokens") as caught:
        counted(chunks, documents=True, change=change)
    assert caught.value.item == 1


def test_flat_columns() -> None:
    """All values are rows; without definition levels there are no nulls either."""
    rows = np.array([5, 3])
    known = np.ones(1, np.bool_)
    places = OffsetIndexes(np.array([0, 2]), rows, rows, rows)
    for max_def, nulls, expected in [(0, [2, 3], [5, 3]), (1, [2, 3], [3, 0]), (1, [5, 4], None)]:
        counts = ColumnIndexes(known, known, np.array(nulls), np.zeros((max_def + 1, 2), np.int64))
        stored = np.ones(1, CHUNK_DTYPE)
        kind = column(0, max_def, 0)
        if expected is None:
            with pytest.raises(MalformedError, match="more nulls than rows"):
                count_from_page_index(
                    places, counts, kind, stored, np.zeros(1, np.int64), documents=True
                )
            continue
        pages, num_uncertain = count_from_page_index(
            places, counts, kind, stored, np.zeros(1, np.int64), documents=True
        )
        assert num_uncertain == 0
        assert pages["tokens"].tolist() == pages["inner"].tolist() == expected
        assert pages["rows"].tolist() == [5, 3]


@SETTINGS
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.integers(-1, 2), st.integers(0, 2), st.sampled_from([False] * 9 + [True])
                ),
                max_size=4,
            ),
            st.sampled_from([0] * 9 + [1]),
            st.sampled_from([0] * 9 + [1]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_sums_of_chunks(chunks: list[tuple[list[tuple[int, int, bool]], int, int]]) -> None:
    """The first chunk that contradicts its metadata is named; pages without rows and tokens do not count."""
    pages = np.array(
        [
            tuple(
                {"rows": rows, "tokens": tokens, "continues": continues}.get(name, 0)
                for name in PAGE_DTYPE.names or ()
            )
            for chunk, _, _ in chunks
            for rows, tokens, continues in chunk
        ],
        PAGE_DTYPE,
    )
    first_page = running_totals([len(chunk) for chunk, _, _ in chunks])
    stored = np.zeros(len(chunks), CHUNK_DTYPE)
    stored["num_levels"] = 2
    begins = []
    rows_differ = []
    tokens_differ = []
    for i, (chunk, more_rows, more_tokens) in enumerate(chunks):
        filled = [page for page in chunk if page[:2] != (0, 0)]
        is_known = all(rows >= 0 for rows, _, _ in filled)
        stored[i]["num_rows"] = sum(rows for rows, _, _ in filled) + more_rows
        stored[i]["top_level"] = sum(tokens for _, tokens, _ in filled) + more_tokens
        stored[i]["null_count"] = -stored[i]["top_level"]
        begins += [i] * (bool(filled) and filled[0][2])
        rows_differ += [i] * (is_known and more_rows)
        tokens_differ += [i] * more_tokens
    expected = begins or rows_differ or tokens_differ
    found = without_empty(ChunkPages(first_page, pages, np.zeros((len(chunks), 2), np.int64), 0))
    if not expected:
        _check_sums(found, stored, column(1, 1, 1))
        return
    with pytest.raises(MalformedError) as caught:
        _check_sums(found, stored, column(1, 1, 1))
    assert caught.value.item == expected[0]
    says = "in the middle of a row" if begins else "its row group has" if rows_differ else "states"
    assert says in str(caught.value)
