"""The row order: documents, wherever they lie in the blocks, in an order that is theirs alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.order.document import DocumentOrder
from megablend.testing.orders import ListedBlocks, list_tokens
from tests import naive
from tests.examples import examples
from tests.order.test_orders import spans

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=25).filter(any)


def cut_into_blocks(documents: list[int], edges: list[int]) -> ListedBlocks:
    """Blocks with edges at these tokens, whichever documents lie there."""
    total = sum(documents)
    inside = sorted(min(edge, total) for edge in edges)
    return ListedBlocks([b - a for a, b in pairwise([0, *inside, total])], documents)


@examples(60)
@given(
    LENGTHS,
    st.lists(st.integers(0, 100), max_size=12),
    st.integers(0, 2**63 - 1),
    st.integers(0, 30),
    st.integers(1, 9),
)
def test_row_equals_its_twin(
    documents: list[int], edges: list[int], key: int, threshold: int, group: int
) -> None:
    blocks = cut_into_blocks(documents, edges)
    order = DocumentOrder(blocks, key, threshold=threshold, group=group)
    expected = naive.row_tokens(documents, blocks.listed, key, 3, threshold=threshold, group=group)
    assert list_tokens(order, 0, 3 * blocks.num_tokens) == expected


@examples(60)
@given(LENGTHS, st.lists(st.integers(0, 100), max_size=12), st.integers(0, 2**63 - 1), st.data())
def test_every_token_of_every_epoch_once_and_entry_anywhere(
    documents: list[int], edges: list[int], key: int, data: st.DataObject
) -> None:
    blocks = cut_into_blocks(documents, edges)
    walk = list_tokens(DocumentOrder(blocks, key, threshold=5, group=3), 0, 2 * blocks.num_tokens)
    everything = [
        (block, token) for block, size in enumerate(blocks.listed) for token in range(size)
    ]
    for epoch in range(2):
        part = walk[epoch * blocks.num_tokens : (epoch + 1) * blocks.num_tokens]
        assert sorted(part) == [(epoch, *token) for token in everything]
    start = data.draw(st.integers(0, len(walk)))
    stop = data.draw(st.integers(start, len(walk)))
    assert (
        list_tokens(DocumentOrder(blocks, key, threshold=5, group=3), start, stop)
        == walk[start:stop]
    )


def test_documents_stay_whole_over_blocks() -> None:
    order = DocumentOrder(ListedBlocks([4, 4, 4], [1, 9, 2]), 3)
    found = spans(order, 0, 12)
    at = found.index((0, 0, 1, 4))
    assert found[at : at + 3] == [(0, 0, 1, 4), (0, 1, 0, 4), (0, 2, 0, 2)]


def test_many_stretches_at_once_are_each_by_itself() -> None:
    order = DocumentOrder(ListedBlocks([4, 0, 7, 1, 5], [3, 0, 6, 8]), 5, threshold=2, group=2)
    starts = [0, 40, 3, 3, 100, 16]
    found = order.spans(np.array(starts), 21)
    listed = list(zip(*(column.tolist() for column in found), strict=True))
    assert found.rows.tolist() == sorted(found.rows.tolist())
    for row, start in enumerate(starts):
        assert [span[1:] for span in listed if span[0] == row] == spans(order, start, start + 21)


@pytest.mark.long
@pytest.mark.parametrize(("threshold", "group"), [(10, 10), (3, 2)])
def test_every_document_is_everywhere_about_equally_often(threshold: int, group: int) -> None:
    order = DocumentOrder(ListedBlocks([3, 3], [1] * 6), 11, threshold=threshold, group=group)
    epochs = 6000
    found = np.array(
        [3 * block + token for _, block, token in list_tokens(order, 0, 6 * epochs)]
    ).reshape(epochs, 6)
    counts = np.array([np.bincount(column, minlength=6) for column in found.T])
    assert np.abs(counts - epochs / 6).max() < 150


def test_memory_of_an_epoch_is_that_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(0, 5, 5000).tolist()
    blocks = ListedBlocks([sum(lengths)], lengths)
    asked = list[int]()
    before = ListedBlocks.before

    def counted(listed: ListedBlocks, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        asked.append(len(documents))
        return before(listed, documents)

    monkeypatch.setattr(ListedBlocks, "before", counted)
    order = DocumentOrder(blocks, 1, threshold=100, group=50)
    assert len(list_tokens(order, 3 * blocks.num_tokens + 7, 3 * blocks.num_tokens + 27)) == 20
    assert max(asked) == 50
    assert order.memory_bytes < 16 * (5000 // 50 + 2 * 50 + 10) * 2


def test_neighbours_are_never_in_one_group() -> None:
    order = DocumentOrder(ListedBlocks([400], [1] * 400), 1, threshold=10, group=40)
    found = np.array([token for _, _, token in list_tokens(order, 0, 400)]).reshape(10, 40)
    assert all(len(set(part % 10)) == 1 for part in found)


def test_row_order_is_frozen() -> None:
    """Runs resume by sample number alone: another order here would break every run in progress."""
    blocks = ListedBlocks([5, 7], [1] * 12)
    one = [
        5 * block + token for _, block, token in list_tokens(DocumentOrder(blocks, 1234), 12, 24)
    ]
    two = [
        5 * block + token
        for _, block, token in list_tokens(
            DocumentOrder(blocks, 1234, threshold=3, group=3), 12, 24
        )
    ]
    assert one == [8, 1, 9, 0, 5, 2, 11, 10, 7, 3, 6, 4]
    assert two == [9, 5, 1, 2, 10, 6, 11, 7, 3, 8, 4, 0]
