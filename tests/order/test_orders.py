"""What every order keeps: each token of each epoch once, and entry at any token."""

import pickle
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megablend.order.base import Blocks, DocumentBlocks, Order
from megablend.order.block import BlockOrder
from megablend.order.document import DocumentOrder
from megablend.order.registry import ORDERS
from tests import naive

TWO_LEVELS = partial(BlockOrder, threshold=3, groups=4)
RUNS = partial(BlockOrder, threshold=3, groups=2, runs=2)
MAKERS: dict[str, Callable[[DocumentBlocks, int], Order]] = {
    **{name: kind.make for name, kind in ORDERS.items()},
    "block in two levels": TWO_LEVELS,
    "block in runs": RUNS,
    "document in two levels": partial(DocumentOrder, threshold=3, group=2),
}
SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=25).filter(any)


class ListedBlocks:
    """Blocks whose token counts are a list; a document is a block, unless other lengths are given."""

    def __init__(self, sizes: list[int], documents: list[int] | None = None) -> None:
        self.listed = sizes
        self.num_blocks, self.num_tokens = len(sizes), sum(sizes)
        self._documents = sizes if documents is None else documents

    @property
    def documents(self) -> Blocks:
        return ListedBlocks(self._documents)

    def before(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        running = np.concatenate([[0], np.cumsum(self.listed)])
        return running[blocks]

    def group_totals(self, num_groups: int, run: int) -> npt.NDArray[np.int64]:
        totals = np.zeros(num_groups, np.int64)
        for block, size in enumerate(self.listed):
            totals[block // run % num_groups] += size
        return totals

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        raise NotImplementedError


def spans(order: Order, start: int, stop: int) -> list[tuple[int, int, int, int]]:
    """(epoch, block, first token, stop) of one stretch."""
    rows, *columns = order.spans(np.array([start]), stop - start)
    assert not rows.any()
    return list(zip(*(column.tolist() for column in columns), strict=True))


def tokens(order: Order, start: int, stop: int) -> list[tuple[int, int, int]]:
    found = spans(order, start, stop)
    assert all(first < last for _, _, first, last in found)
    return [(epoch, block, token) for epoch, block, first, last in found for token in range(first, last)]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@settings(max_examples=40, derandomize=True, deadline=None)
@given(sizes=SIZES, key=st.integers(0, 2**64), data=st.data())
def test_every_token_of_every_epoch_once_and_entry_anywhere(
    make: Callable[[DocumentBlocks, int], Order], sizes: list[int], key: int, data: st.DataObject
) -> None:
    blocks = ListedBlocks(sizes)
    walk = tokens(make(blocks, key), 0, 3 * blocks.num_tokens)
    everything = [(block, token) for block, size in enumerate(sizes) for token in range(size)]
    for epoch in range(3):
        part = walk[epoch * blocks.num_tokens : (epoch + 1) * blocks.num_tokens]
        assert sorted(part) == [(epoch, *token) for token in everything]
    start = data.draw(st.integers(0, len(walk)))
    stop = data.draw(st.integers(start, len(walk)))
    assert tokens(make(blocks, key), start, stop) == walk[start:stop]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_blocks_are_read_in_one_piece(make: Callable[[DocumentBlocks, int], Order]) -> None:
    found = spans(make(ListedBlocks([4, 0, 3, 9, 1, 2, 7]), 3), 0, 52)
    assert len(found) == 12
    assert all(start == 0 for _, _, start, _ in found)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_sample_longer_than_the_source_spans_epochs(make: Callable[[DocumentBlocks, int], Order]) -> None:
    found = spans(make(ListedBlocks([0, 2, 0]), 1), 5, 12)
    assert found == [(2, 1, 1, 2), (3, 1, 0, 2), (4, 1, 0, 2), (5, 1, 0, 2)]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_far_positions(make: Callable[[DocumentBlocks, int], Order]) -> None:
    order = make(ListedBlocks([5, 3, 8, 2, 6]), 1)
    epoch = 2**60 // 24
    assert sum(stop - start for _, _, start, stop in spans(order, 2**60, 2**60 + 100)) == 100
    assert spans(order, epoch * 24, epoch * 24 + 24)[0][0] == epoch


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_empty_stretches_have_no_spans(make: Callable[[DocumentBlocks, int], Order]) -> None:
    assert spans(make(ListedBlocks([5, 3]), 1), 7, 7) == []


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@settings(max_examples=40, derandomize=True, deadline=None)
@given(sizes=SIZES, starts=st.lists(st.integers(0, 400), max_size=12), length=st.integers(0, 90))
def test_many_stretches_at_once_are_each_by_itself(
    make: Callable[[DocumentBlocks, int], Order], sizes: list[int], starts: list[int], length: int
) -> None:
    order = make(ListedBlocks(sizes), 5)
    found = order.spans(np.array(starts, np.int64), length)
    assert found.rows.tolist() == sorted(found.rows.tolist())
    listed = list(zip(*(column.tolist() for column in found), strict=True))
    for row, start in enumerate(starts):
        assert [span[1:] for span in listed if span[0] == row] == spans(order, start, start + length)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_pickles_and_serves_threads(make: Callable[[DocumentBlocks, int], Order]) -> None:
    order = make(ListedBlocks([3, 1, 4, 1, 5, 9, 2, 6]), 7)
    expected = tokens(order, 0, 31 * 20)
    copy = pickle.loads(pickle.dumps(order))
    found: dict[int, list[tuple[int, int, int]]] = {}

    def walk(part: int) -> None:
        for start in range(part * 155, part * 155 + 155, 5):
            found[start] = tokens(copy, start, start + 5)

    threads = [threading.Thread(target=walk, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [token for start in sorted(found) for token in found[start]] == expected


@settings(max_examples=40, derandomize=True, deadline=None)
@given(SIZES, st.integers(0, 2**63 - 1), st.integers(0, 30), st.integers(1, 9), st.integers(1, 4))
def test_page_equals_its_twin(sizes: list[int], key: int, threshold: int, groups: int, runs: int) -> None:
    order = BlockOrder(ListedBlocks(sizes), key, threshold=threshold, groups=groups, runs=runs)
    expected = naive.page_tokens(sizes, key, 3, threshold=threshold, groups=groups, runs=runs)
    assert tokens(order, 0, 3 * sum(sizes)) == expected


@pytest.mark.parametrize("name", ["block", "block in two levels", "document", "document in two levels"])
def test_orders_shuffle_anew_by_epoch_and_key(name: str) -> None:
    make, blocks = MAKERS[name], ListedBlocks([1] * 40)
    seen = set()
    for key in range(5):
        walk = tokens(make(blocks, key), 0, 5 * 40)
        seen |= {tuple(block for _, block, _ in walk[epoch * 40 : epoch * 40 + 40]) for epoch in range(5)}
    assert len(seen) == 25


def test_page_puts_every_block_everywhere_equally_often() -> None:
    order, epochs = BlockOrder(ListedBlocks([1] * 6), 11), 6000
    blocks = np.array([block for _, block, _ in tokens(order, 0, 6 * epochs)]).reshape(epochs, 6)
    counts = np.array([np.bincount(column, minlength=6) for column in blocks.T])
    assert np.abs(counts - epochs / 6).max() < 150


def test_page_holds_about_as_much_as_it_says() -> None:
    for num_blocks in (1000, 70_000):
        order = BlockOrder(ListedBlocks([1] * num_blocks), 1)
        kept = [order._epochs, order._entered]
        for epoch in range(4):
            order.spans(np.array([epoch * num_blocks]), 1)
        held = sum(array.nbytes for recent in kept for shuffled in recent._kept.values() for array in shuffled)
        assert held * 0.9 <= order.memory_bytes <= held * 1.5


def test_page_order_is_frozen() -> None:
    """Runs resume by sample number alone: another order here would break every run in progress."""
    blocks = ListedBlocks([1] * 12)
    one = [block for _, block, _ in tokens(BlockOrder(blocks, 1234), 12, 24)]
    two = [block for _, block, _ in tokens(BlockOrder(blocks, 1234, threshold=3, groups=4), 12, 24)]
    assert one == [8, 1, 9, 0, 5, 2, 11, 10, 7, 3, 6, 4]
    assert two == [9, 5, 1, 2, 10, 6, 11, 7, 3, 8, 4, 0]


def test_sequential_keeps_the_blocks_in_place() -> None:
    order = ORDERS["sequential"].make(ListedBlocks([2, 0, 3]), 1)
    assert spans(order, 1, 9) == [(0, 0, 1, 2), (0, 2, 0, 3), (1, 0, 0, 2), (1, 2, 0, 2)]


def test_large_sources_are_frozen_too() -> None:
    """As above; of the constants that only large sources meet."""
    order = BlockOrder(ListedBlocks([1] * 70_000), 1234)
    assert [block for _, block, _ in tokens(order, 70_000, 70_006)] == [53753, 38438, 24144, 40480, 69068, 32312]
    runs = BlockOrder(ListedBlocks([1] * 70), 1234, threshold=3, groups=5, runs=2)
    assert [block for _, block, _ in tokens(runs, 0, 14)] == [63, 68, 67, 64, 66, 28, 31, 32, 34, 33, 29, 30, 69, 65]
