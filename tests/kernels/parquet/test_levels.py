import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.kernels.parquet.levels import (
    BROKEN,
    LEVELS_DTYPE,
    NONE,
    TOO_FEW,
    TOO_HIGH,
    TOO_LONG,
    read_levels,
)
from tests.examples import examples
from tests.kernels.parquet_streams import groups, hybrids, packed, run, varint

SETTINGS = examples(80)


def read(
    rep: bytes | None,
    definition: bytes | None,
    num_levels: int,
    max_def: int,
    *,
    v2: bool = False,
    room: int = 10**4,
) -> tuple[dict[str, Any], list[int]]:
    """What is found of one page, None where levels are not stored; and the offsets of its pieces."""
    parts = [part for part in (rep, definition) if part is not None]
    body = (
        b"".join(part if v2 else len(part).to_bytes(4, "little") + part for part in parts)
        + b"values"
    )
    buffer = pa.py_buffer(body)
    page = np.zeros(1, LEVELS_DTYPE)
    page["address"] = buffer.address
    page["size"] = buffer.size
    page["num_levels"] = num_levels
    page["rep_bytes"] = len(rep or b"") if v2 else -1
    page["def_bytes"] = len(definition or b"") if v2 else -1
    offsets = np.full(room, -7, np.int64)
    read_levels(page, max_def, rep is not None, offsets, np.array([0, room]))
    found = {name: page[name][0].item() for name in LEVELS_DTYPE.names or ()}
    assert found["problem"] != NONE or (offsets[found["pieces"] + 1 :] == -7).all()
    return found, offsets[: found["pieces"] + 1].tolist()


def lengths_of(rep: list[int], definition: list[int], max_def: int) -> list[int]:
    """Tokens by piece."""
    pieces: list[int] = []
    for r, d in zip(rep, definition, strict=True):
        if r == 0 or not pieces:
            pieces.append(0)
        pieces[-1] += d == max_def
    return pieces


def check(
    rep: list[int], definition: list[int], max_def: int, found: dict[str, Any], offsets: list[int]
) -> None:
    pieces = lengths_of(rep, definition, max_def)
    assert offsets == [sum(pieces[:i]) for i in range(len(pieces) + 1)]
    assert (found["problem"], found["tokens"], found["pieces"]) == (NONE, sum(pieces), len(pieces))
    continues = bool(rep) and rep[0] == 1
    begun = pieces[1:] if continues else pieces
    assert found["continues"] == continues
    assert found["head"] == (pieces[0] if continues else 0)
    assert found["inner"] == sum(length > 0 for length in begun[:-1])
    assert found["tail"] == (begun[-1] if begun else 0)


@SETTINGS
@given(hybrids(1, 1), hybrids(2, 3), st.booleans())
def test_levels_of_lists(
    rep: tuple[bytes, list[int]], definition: tuple[bytes, list[int]], v2: bool
) -> None:
    count = min(len(rep[1]), len(definition[1]))
    found, offsets = read(rep[0], definition[0], count, 3, v2=v2)
    check(rep[1][:count], definition[1][:count], 3, found, offsets)
    assert found["begin"] == len(rep[0]) + len(definition[0]) + (0 if v2 else 8)


@SETTINGS
@given(hybrids(1, 1), st.booleans())
def test_levels_that_are_not_stored(levels: tuple[bytes, list[int]], v2: bool) -> None:
    data, values = levels
    count = len(values)
    check([0] * count, values, 1, *read(None, data, count, 1, v2=v2))
    check(values, [0] * count, 0, *read(data, None, count, 0, v2=v2))
    check([0] * 9, [0] * 9, 0, *read(None, None, 9, 0, v2=v2))


@SETTINGS
@given(hybrids(7, 100), st.integers(1, 100))
def test_deep_levels(levels: tuple[bytes, list[int]], max_def: int) -> None:
    width = max_def.bit_length()
    values = [min(value, max_def) for value in levels[1]]
    stream = b"".join(groups(values[i : i + 8], width) for i in range(0, len(values) // 8 * 8, 8))
    count = len(values) // 8 * 8
    check([0] * count, values[:count], max_def, *read(None, stream, count, max_def))


@SETTINGS
@given(hybrids(1, 1), hybrids(2, 3), st.integers(0, 20), st.integers(0, 20))
def test_streams_that_break_off_are_noticed_or_are_not_needed(
    rep: tuple[bytes, list[int]], definition: tuple[bytes, list[int]], cut_rep: int, cut_def: int
) -> None:
    count = min(len(rep[1]), len(definition[1]))
    cut = [
        rep[0][: max(0, len(rep[0]) - cut_rep)],
        definition[0][: max(0, len(definition[0]) - cut_def)],
    ]
    found, offsets = read(cut[0], cut[1], count, 3)
    if found["problem"] == NONE:
        check(rep[1][:count], definition[1][:count], 3, found, offsets)
    else:
        assert found["problem"] in (BROKEN, TOO_FEW)
        assert found["detail"] < count


def test_pieces_without_room_are_left_out_and_counted() -> None:
    found, offsets = read(run(0, 50, 1), run(3, 50, 2), 50, 3, room=7)
    assert (found["pieces"], offsets) == (50, list(range(7)))
    found, _ = read(run(0, 50, 1), run(3, 50, 2), 50, 3, room=0)
    assert found["pieces"] == 50


def test_pages_of_a_batch() -> None:
    held = []
    rows = [5, 0, 3, 9]
    pages = np.zeros(4, LEVELS_DTYPE)
    for page, count in zip(pages, rows, strict=True):
        body = (len(run(1, count, 1))).to_bytes(4, "little") + run(1, count, 1)
        held.append(pa.py_buffer(body))
        page["address"] = held[-1].address
        page["size"] = held[-1].size
        page["num_levels"] = count
    pages["rep_bytes"] = pages["def_bytes"] = -1
    first = np.concatenate(([0], np.cumsum(np.array(rows) + 1)))
    offsets = np.zeros(first[-1], np.int64)
    read_levels(pages, 1, False, offsets, first)
    parts = [offsets[a:b].tolist() for a, b in itertools.pairwise(first)]
    assert parts == [list(range(count + 1)) for count in rows]


def test_a_last_group_may_be_cut_short() -> None:
    stream = varint(2 * 2 + 1) + packed([1, 0, 1, 1, 1, 1, 0, 0], 1)
    check([0] * 8, [1, 0, 1, 1, 1, 1, 0, 0], 1, *read(None, stream, 8, 1))


@pytest.mark.parametrize(
    ("stream", "max_def", "problem", "detail"),
    [
        (b"\x80", 3, BROKEN, 0),
        (b"\xff\xff\xff\xff\xff\x01", 3, BROKEN, 0),
        (b"\x04", 3, BROKEN, 0),
        (run(3, 4, 2) + b"\x04", 3, BROKEN, 4),
        (run(3, 4, 2), 3, TOO_FEW, 4),
        (b"", 3, TOO_FEW, 0),
        (run(3, 5, 2), 2, TOO_HIGH, 3),
        (groups([1, 1, 3, 0, 0, 0, 0, 0], 2), 2, TOO_HIGH, 3),
    ],
)
def test_broken_levels(stream: bytes, max_def: int, problem: int, detail: int) -> None:
    found, _ = read(None, stream, 5, max_def)
    assert (found["problem"], found["detail"]) == (problem, detail)


@pytest.mark.parametrize(
    ("body", "detail"),
    [(b"", 0), (b"\xff\xff", 65535), (b"\x05\0\0\0abcd", 5), (b"\xff" * 4, 2**32 - 1)],
)
def test_levels_longer_than_their_page(body: bytes, detail: int) -> None:
    buffer = pa.py_buffer(body)
    page = np.zeros(1, LEVELS_DTYPE)
    page["address"] = buffer.address
    page["size"] = buffer.size
    page["num_levels"] = 5
    page["rep_bytes"] = page["def_bytes"] = -1
    read_levels(page, 1, False, np.zeros(9, np.int64), np.array([0, 9]))
    assert (page["problem"][0], page["detail"][0]) == (TOO_LONG, detail)
