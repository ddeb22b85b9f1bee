"""Samples gathered out of blocks of any type, and where documents begin in them, against lists."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.formats.base import DecodedBlock
from megablend.formats.decoded import DecodedBlocks
from megablend.kernels.reader.gather import PORTION
from megablend.order.base import Spans
from megablend.prefetch.block_table import BlockTable
from tests.examples import examples

TYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"]


def block(tokens: list[int], dtype: str, offsets: list[int] | None = None) -> DecodedBlock:
    edges = [0, len(tokens)] if offsets is None else offsets
    return DecodedBlock(np.array(tokens, dtype), np.array(edges, np.int64))


def spans(listed: list[tuple[int, int, int, int, int]]) -> Spans:
    """Of (row, epoch, block, start, stop)."""
    return Spans(*np.array(listed, np.int64).reshape(-1, 5).T.copy())


def table_of(blocks: list[DecodedBlock], ids: list[int] | None = None) -> BlockTable:
    table = BlockTable(np.array(range(len(blocks)) if ids is None else ids, np.int64))
    table.put(np.arange(len(blocks)), DecodedBlocks.of(blocks), np.arange(len(blocks)))
    return table


def samples_of(walk: list[tuple[int, int, int]], width: int) -> Spans:
    """Tokens (place, start, stop) one after the other, cut into samples."""
    listed = []
    filled = 0
    for place, low, stop in walk:
        start = low
        while start < stop:
            end = min(stop, start + width - filled % width)
            listed.append((filled // width, 0, place, start, end))
            filled = filled + end - start
            start = end
    return spans(listed)


@examples(200)
@given(st.data())
def test_samples_of_blocks_of_several_types(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    listed = [[10 * place + token for token in range(size)] for place, size in enumerate(sizes)]
    blocks = [block(tokens, data.draw(st.sampled_from(TYPES))) for tokens in listed]
    walk = []
    for place in data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=12)):
        start = data.draw(st.integers(0, sizes[place]))
        walk.append((place, start, data.draw(st.integers(start, sizes[place]))))
    text = [token for place, start, stop in walk for token in listed[place][start:stop]]
    width = data.draw(
        st.sampled_from([n for n in range(1, len(text) + 1) if len(text) % n == 0] or [1])
    )
    length = data.draw(st.integers(1, width + 2))
    rows = [text[i : i + width] for i in range(0, len(text), width)]
    tokens = np.full((len(rows), length), -1)
    labels = np.full((len(rows), length), -1)
    stretches = samples_of(walk, width)
    table_of(blocks).gather(stretches.blocks, stretches, width, tokens, labels)
    assert tokens.tolist() == [(row + [-1] * length)[:length] for row in rows]
    assert labels.tolist() == [(row[1:] + [-1] * length)[:length] for row in rows]


@pytest.mark.parametrize("length", [2 * PORTION - 1, 2 * PORTION, 3 * PORTION + 5])
def test_samples_that_are_copied_in_portions(length: int) -> None:
    text = list(range(7, 7 + 4 * (length + 1)))
    cuts = [0, 1, PORTION, PORTION + 2, 3 * length, len(text)]
    parts = [text[start:stop] for start, stop in pairwise(cuts)]
    blocks = [block(part, "int32" if len(part) % 2 else "uint16") for part in parts]
    stretches = samples_of([(i, 0, len(part)) for i, part in enumerate(parts)], length + 1)
    tokens, labels = np.full((2, 4, length), -1)
    table_of(blocks).gather(stretches.blocks, stretches, length + 1, tokens, labels)
    rows = [text[i : i + length + 1] for i in range(0, len(text), length + 1)]
    assert tokens.tolist() == [row[:-1] for row in rows]
    assert labels.tolist() == [row[1:] for row in rows]


def test_values_at_the_ends_of_their_types() -> None:
    for dtype in TYPES:
        low = np.iinfo(dtype).min
        high = np.iinfo(dtype).max
        tokens, labels = np.zeros((2, 1, 2), np.int64)
        stretch = spans([(0, 0, 0, 0, 2)])
        table_of([block([low, high], dtype)]).gather(stretch.blocks, stretch, 2, tokens, labels)
        assert (tokens.tolist(), labels.tolist()) == ([[low, high]], [[high, 0]])


@pytest.mark.parametrize(
    ("place", "start", "stop", "width", "rows"),
    [
        (0, 0, 4, 4, 1),
        (0, -1, 2, 3, 1),
        (0, 1, 1, 1, 1),
        (1, 0, 1, 1, 1),
        (-1, 0, 1, 1, 1),
        (0, 0, 3, 2, 1),  # longer than its sample
        (0, 0, 2, 3, 1),  # the sample is not whole
        (0, 0, 2, 2, 2),  # nor are there as many
        (0, 0, 2, 2, 0),
    ],
)
def test_nothing_is_read_outside_of_a_block_or_a_sample(
    place: int, start: int, stop: int, width: int, rows: int
) -> None:
    table = table_of([block([1, 2, 3], "int32")])
    found = spans([(0, 0, place, start, stop)])
    with pytest.raises(AssertionError, match=r"span . of 1 is outside its block or sample"):
        table.gather(found.blocks, found, width, *np.zeros((2, rows, width), np.int64))


def test_a_block_that_was_dropped_has_no_tokens() -> None:
    table = table_of([block([1, 2, 3], "int32")])
    stretch = spans([(0, 0, 0, 0, 1)])
    tokens, labels = np.zeros((2, 1, 1), np.int64)
    table.gather(stretch.blocks, stretch, 1, tokens, labels)
    assert table.drop(np.array([0])) == 0
    with pytest.raises(AssertionError, match="outside its block"):
        table.gather(stretch.blocks, stretch, 1, tokens, labels)


Marks = npt.NDArray[np.bool_]


def twin(
    blocks: list[DecodedBlock], continues: list[bool], listed: list[tuple[Any, ...]], width: int
) -> list[bool]:
    """Each token by itself: is it a piece's first, and if it is a block's first, does the token before go on to it?"""
    tokens = [
        (epoch, place, token)
        for _, epoch, place, start, stop in listed
        for token in range(start, stop)
    ]
    marks = []
    for i, (epoch, place, token) in enumerate(tokens):
        begins = i % width == 0 or token in blocks[place].offsets[:-1].tolist()
        if i % width and token == 0:
            goes_on = tokens[i - 1][:2] == (epoch, place - 1) and continues[place]
            begins = not goes_on
        elif i % width and tokens[i - 1] != (epoch, place, token - 1):
            begins = True
        marks.append(begins)
    return marks


@examples(200)
@given(st.data())
def test_documents_begin_where_pieces_do(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    # Repeated: empty documents
    inner = [data.draw(st.lists(st.integers(0, size), max_size=4)) for size in sizes]
    blocks = [
        block(list(range(size)), "int32", sorted([0, *cuts, size]))
        for size, cuts in zip(sizes, inner, strict=True)
    ]
    continues = [data.draw(st.booleans()) for _ in sizes]
    walk = [
        (epoch, place)
        for epoch in range(2)
        for place in data.draw(st.permutations(range(len(sizes))))
    ]
    width = data.draw(st.integers(1, 9))
    listed = []
    filled = 0
    for epoch, place in walk:
        start = 0
        while start < sizes[place]:
            stop = min(sizes[place], start + width - filled % width)
            listed.append((filled // width, epoch, place, start, stop))
            filled = filled + stop - start
            start = stop
    stretches = spans(listed)
    found = table_of(blocks).begins(stretches.blocks, stretches, filled, width, np.array(continues))
    assert found.tolist() == twin(blocks, continues, listed, width)
