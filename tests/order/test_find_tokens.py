"""Where stored tokens come in an epoch, against lists of all tokens of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.order.base import DocumentBlocks, Order
from megablend.order.block import BlockOrder
from megablend.order.document import DocumentOrder
from megablend.order.sequential import SequentialOrder
from megablend.testing.orders import ListedBlocks
from tests import naive
from tests.examples import examples
from tests.order.test_document_order import LENGTHS, cut_into_blocks
from tests.order.test_orders import SIZES

EPOCHS = 3


def check_ranges(
    order: Order,
    blocks: ListedBlocks,
    epoch: int,
    walk: list[tuple[int, int, int]],
    data: st.DataObject,
) -> None:
    """`walk` has (epoch, block, token) of every token of the first epochs, in the sequence in which they are read."""
    ends = [sum(blocks.listed[: i + 1]) for i in range(blocks.num_blocks)]
    stored = [ends[block] - blocks.listed[block] + token for _, block, token in walk]
    expected = {
        (place[0], token): position
        for position, (place, token) in enumerate(zip(walk, stored, strict=True))
    }
    edges = data.draw(st.lists(st.tuples(*[st.integers(0, blocks.num_tokens)] * 2), max_size=4))
    ranges = [(min(pair), max(pair)) for pair in edges if pair[0] != pair[1]] or [
        (0, blocks.num_tokens)
    ]
    found = order.find_tokens(epoch, *np.array(ranges).T.astype(np.int64))
    assert (found.starts < found.stops).all()
    assert (np.diff(found.rows) >= 0).all()
    listed = [
        (row, first + i, start + i)
        for row, first, start, stop in zip(*(column.tolist() for column in found), strict=True)
        for i in range(stop - start)
    ]
    wanted = [
        (row, token, expected[epoch, token])
        for row, (a, b) in enumerate(ranges)
        for token in range(a, b)
    ]
    assert sorted(listed) == wanted


@pytest.mark.parametrize(("threshold", "groups", "runs"), [(99, 4, 4), (3, 4, 64), (3, 2, 2)])
@examples(40)
@given(sizes=SIZES, key=st.integers(0, 2**63 - 1), epoch=st.integers(0, EPOCHS - 1), data=st.data())
def test_blocks(
    threshold: int,
    groups: int,
    runs: int,
    sizes: list[int],
    key: int,
    epoch: int,
    data: st.DataObject,
) -> None:
    settings_of = {"threshold": threshold, "groups": groups, "runs": runs}
    blocks = ListedBlocks(sizes)
    walk = naive.page_tokens(sizes, key, EPOCHS, **settings_of)
    check_ranges(BlockOrder(blocks, key, **settings_of), blocks, epoch, walk, data)


@examples(60)
@given(
    LENGTHS,
    st.lists(st.integers(0, 100), max_size=12),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2),
    st.data(),
)
def test_documents(
    documents: list[int], edges: list[int], key: int, epoch: int, data: st.DataObject
) -> None:
    blocks = cut_into_blocks(documents, edges)
    walk = naive.row_tokens(documents, blocks.listed, key, EPOCHS, threshold=5, group=3)
    check_ranges(DocumentOrder(blocks, key, threshold=5, group=3), blocks, epoch, walk, data)


@examples(20)
@given(SIZES, st.integers(0, 2), st.data())
def test_sequential(sizes: list[int], epoch: int, data: st.DataObject) -> None:
    walk = [
        (e, b, token)
        for e in range(EPOCHS)
        for b, size in enumerate(sizes)
        for token in range(size)
    ]
    check_ranges(SequentialOrder(ListedBlocks(sizes), 0), ListedBlocks(sizes), epoch, walk, data)


@pytest.mark.parametrize(
    "make", [BlockOrder, partial(BlockOrder, threshold=3, groups=4), SequentialOrder]
)
def test_far_epochs(make: Callable[[DocumentBlocks, int], Order]) -> None:
    order = make(ListedBlocks([5, 3, 8, 2, 6]), 1)
    epoch = 2**50
    found = order.find_tokens(epoch, np.array([16]), np.array([18]))  # all of block 3
    (start,) = found.starts.tolist()
    (stop,) = found.stops.tolist()
    _, epochs, read, starts, stops = (
        column.tolist() for column in order.spans(found.starts, stop - start)
    )
    assert (epochs, read, starts, stops) == ([epoch], [3], [0], [2])
