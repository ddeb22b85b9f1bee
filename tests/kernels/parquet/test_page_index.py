"""The kernels that read page indices, against what was written."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.formats.parquet.metadata.thrift import Kind
from megablend.kernels.parquet import page_index
from megablend.kernels.parquet.page_index import MIN_LOCATION_BYTES, page_counts, page_locations
from tests.examples import examples
from tests.formats.thrift_writer import write_struct

SETTINGS = examples(150)
Int64s = npt.NDArray[np.int64]
Fields = list[tuple[int, Kind, object]]
Place = tuple[int, int, int]
"""Offset, size, first row."""
LIMIT = 1 << 40


def side_by_side(parts: list[bytes]) -> tuple[npt.NDArray[np.uint8], Int64s, Int64s]:
    """Parts with a byte between them, and where each begins and ends."""
    ends = np.cumsum([len(part) + 1 for part in parts]) - 1
    begins = ends - [len(part) for part in parts]
    # Writable, as those that are read: kernels are compiled for either
    data = bytearray(b"\xff".join(parts) + b"\xff")
    return np.frombuffer(data, np.uint8), begins, ends


def offset_index(places: list[Place]) -> bytes:
    kinds = Kind.I64, Kind.I32, Kind.I64
    structs = [write_struct(list(zip((1, 2, 3), kinds, place, strict=True))) for place in places]
    return write_struct(
        [(1, Kind.LIST, (Kind.STRUCT, structs)), (2, Kind.LIST, (Kind.I64, [7, 8]))]
    )


def locations(
    parts: list[bytes], starts: list[int], num_rows: list[int]
) -> tuple[tuple[int, int, int], list[Int64s]]:
    data, begins, ends = side_by_side(parts)
    offsets, sizes, rows = np.full((3, len(data) // MIN_LOCATION_BYTES), -9, np.int64)
    first_page = np.full(len(parts) + 1, -9, np.int64)
    found = page_locations(
        data,
        begins,
        ends,
        np.array(starts),
        LIMIT,
        np.array(num_rows),
        first_page,
        offsets,
        sizes,
        rows,
    )
    return found, [first_page, offsets, sizes, rows]


@st.composite
def chunks_of_places(draw: st.DrawFn) -> tuple[list[list[Place]], list[int], list[int]]:
    """Pages of chunks, where each chunk begins, and its rows."""
    chunks = []
    starts = []
    num_rows = []
    for _ in range(draw(st.integers(1, 4))):
        start = at = draw(st.integers(1, 2**39))
        places = []
        row = 0
        for gap, size, rows in draw(
            st.lists(
                st.tuples(st.integers(0, 99), st.integers(0, 2**31 - 1), st.integers(0, 2**33)),
                min_size=1,
                max_size=9,
            )
        ):
            places.append((at + gap, size, row))
            at = at + gap + size
            row = row + rows
        chunks.append(places)
        starts.append(start)
        num_rows.append(row)
    return chunks, starts, num_rows


@SETTINGS
@given(chunks_of_places(), st.integers(1, 30))
def test_places_of_pages(written: tuple[list[list[Place]], list[int], list[int]], cut: int) -> None:
    chunks, starts, num_rows = written
    parts = [offset_index(places) for places in chunks]
    found, (first_page, offsets, sizes, rows) = locations(parts, starts, num_rows)
    assert found == (len(chunks), page_index.NONE, 0)
    assert first_page.tolist() == np.cumsum([0, *map(len, chunks)]).tolist()
    pages = [place for places in chunks for place in places]
    assert list(zip(offsets[: len(pages)].tolist(), sizes[: len(pages)].tolist(), strict=True)) == [
        place[:2] for place in pages
    ]
    for places, total, begin in zip(chunks, num_rows, first_page[:-1].tolist(), strict=True):
        rows_of_pages = rows[begin : begin + len(places)].tolist()
        assert [sum(rows_of_pages[:i]) for i in range(len(places))] == [
            place[2] for place in places
        ]
        assert sum(rows_of_pages) == total
    parts[-1] = parts[-1][:-cut]
    assert locations(parts, starts, num_rows)[0] == (len(chunks) - 1, page_index.UNREADABLE, 0)


@SETTINGS
@given(chunks_of_places(), st.data())
def test_places_that_cannot_be(
    written: tuple[list[list[Place]], list[int], list[int]], data: st.DataObject
) -> None:
    chunks, starts, num_rows = written
    chunk = data.draw(st.integers(0, len(chunks) - 1))
    places = chunks[chunk]
    page = data.draw(st.integers(0, len(places) - 1))
    number = data.draw(st.integers(0, 2))
    extremes = st.sampled_from([-(2**63), -1, 0, 2**31, 2**48, 2**48 + 1, 2**63 - 1])
    changed = list(places[page])
    changed[number] = data.draw(extremes | st.integers(0, 2**41))
    places[page] = changed[0], changed[1], changed[2]
    covered = [byte for place in places for byte in (place[0], place[0] + place[1])]
    firsts = [place[2] for place in places]
    is_sound = (
        all(0 <= value <= 2**48 for place in places for value in place)
        and all(place[1] < 2**31 for place in places)
        and [starts[chunk], *covered, LIMIT] == sorted([starts[chunk], *covered, LIMIT])
    )
    is_ordered = firsts[0] == 0 and [*firsts, num_rows[chunk]] == sorted([*firsts, num_rows[chunk]])
    (found, problem, _), (first_page, _, _, rows) = locations(
        [offset_index(places) for places in chunks], starts, num_rows
    )
    assert (found, problem == page_index.NONE) == (
        (len(chunks), True) if is_sound else (chunk, False)
    )
    if is_sound:
        is_known = rows[first_page[chunk] : first_page[chunk + 1]] >= 0
        assert is_known.tolist() == [is_ordered] * len(places)
    if not 0 <= changed[number] <= 2**48:
        assert problem == (page_index.BAD_OFFSET, page_index.BAD_SIZE, page_index.BAD_ROW)[number]


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [(1, Kind.I64, 5)],
        [(1, Kind.LIST, (Kind.I64, [5]))],
        [(1, Kind.LIST, (Kind.STRUCT, [write_struct([(1, Kind.I64, 5), (2, Kind.I32, 5)])]))],
        [(1, Kind.LIST, (Kind.STRUCT, [write_struct([(1, Kind.BINARY, b"xxxxxxxxx")])]))],
    ],
)
def test_what_is_no_offset_index(fields: Fields) -> None:
    assert locations([write_struct(fields)], [4], [1])[0] == (0, page_index.UNREADABLE, 0)
    no_pages = write_struct([(1, Kind.LIST, (Kind.STRUCT, []))])
    assert locations([no_pages], [4], [1])[0] == (0, page_index.NO_PAGES, 0)


HEIGHTS = 1, 3
"""Of counts of nulls, definition levels."""


def counts(
    parts: list[bytes], num_pages: list[int]
) -> tuple[tuple[int, int, int], Int64s, list[Int64s]]:
    data, begins, ends = side_by_side(parts)
    nulls, levels = out = [np.full((height, sum(num_pages)), -9, np.int64) for height in HEIGHTS]
    found = np.full((len(parts), 2), -9, np.int64)
    first_page = np.cumsum([0, *num_pages])
    return page_counts(data, begins, ends, first_page, nulls, levels, found), found, out


def column_index(lists: list[list[int]]) -> bytes:
    """With a histogram of repetition levels, which is wrong and not read."""
    nulls, levels = lists
    fields: Fields = [
        (number, Kind.LIST, (Kind.I64, values))
        for number, values in ((5, nulls), (6, [-7]), (7, levels))
        if values
    ]
    return write_struct([(2, Kind.LIST, (Kind.BINARY, [b"abc", b""])), *fields])


@st.composite
def lists_of_counts(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """The counts of nulls and of definition levels of a ColumnIndex, either may be empty, and its pages."""
    pages = draw(st.integers(1, 4))
    nulls = [draw(st.integers(0, 2**40)) for _ in range(pages)]
    levels = [draw(st.integers(0, 2**40)) for _ in range(pages * 3)]
    return [values if draw(st.booleans()) else [] for values in (nulls, levels)], pages


@SETTINGS
@given(st.lists(lists_of_counts(), min_size=1, max_size=4), st.data())
def test_counts_of_column_indexes(
    chunks: list[tuple[list[list[int]], int]], data: st.DataObject
) -> None:
    absent = data.draw(st.integers(-1, len(chunks) - 1))
    if absent >= 0:
        chunks[absent] = [[], []], chunks[absent][1]
    parts = [b"" if i == absent else column_index(lists) for i, (lists, _) in enumerate(chunks)]
    num_pages = [pages for _, pages in chunks]
    problem, found, out = counts(parts, num_pages)
    assert problem == (len(chunks), page_index.NONE, 0)
    assert found.tolist() == [[len(values) for values in lists] for lists, _ in chunks]
    for kind, height in enumerate(HEIGHTS):
        expected = [
            number for lists, pages in chunks for number in lists[kind] or [0] * height * pages
        ]
        assert out[kind].T.ravel().tolist() == expected
    chunk = data.draw(st.integers(0, len(chunks) - 1))
    kind = data.draw(st.integers(0, 1))
    if parts[chunk]:
        assert counts([*parts[:chunk], parts[chunk][:-1]], num_pages[: chunk + 1])[0] == (
            chunk,
            page_index.UNREADABLE,
            0,
        )
    values = chunks[chunk][0][kind]
    if values:
        values.append(5)
        parts[chunk] = column_index(chunks[chunk][0])
        assert counts(parts, num_pages)[0] == (chunk, page_index.INCOMPLETE, kind)
        values.pop()
        values[-1] = data.draw(st.sampled_from([-1, -(2**63), 2**40 + 1, 2**63 - 1]))
        parts[chunk] = column_index(chunks[chunk][0])
        assert counts(parts, num_pages)[0] == (chunk, page_index.BAD_COUNT, kind)
