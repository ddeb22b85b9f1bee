"""What single orders promise beyond the contract: their twins, their constants, what they hold in memory."""

import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megablend.order.base import DocumentBlocks, Order
from megablend.order.block import BlockOrder
from megablend.order.document import DocumentOrder
from megablend.order.registry import ORDERS
from megablend.order.sequential import LISTED_BLOCKS, SequentialOrder
from megablend.testing.orders import ListedBlocks, list_tokens
from tests import naive
from tests.examples import examples

TWO_LEVELS = partial(BlockOrder, threshold=3, groups=4)
RUNS = partial(BlockOrder, threshold=3, groups=2, runs=2)
MAKERS: dict[str, Callable[[DocumentBlocks, int], Order]] = {
    **{name: kind.make for name, kind in ORDERS.items()},
    "block in two levels": TWO_LEVELS,
    "block in runs": RUNS,
    "document in two levels": partial(DocumentOrder, threshold=3, group=2),
}
SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=25).filter(any)


def spans(order: Order, start: int, stop: int) -> list[tuple[int, int, int, int]]:
    """(epoch, block, first token, stop) of one stretch."""
    rows, *columns = order.spans(np.array([start]), stop - start)
    assert not rows.any()
    return list(zip(*(column.tolist() for column in columns), strict=True))


@examples(40)
@given(SIZES, st.integers(0, 2**63 - 1), st.integers(0, 30), st.integers(1, 9), st.integers(1, 4))
def test_page_equals_its_twin(
    sizes: list[int], key: int, threshold: int, groups: int, runs: int
) -> None:
    order = BlockOrder(ListedBlocks(sizes), key, threshold=threshold, groups=groups, runs=runs)
    expected = naive.page_tokens(sizes, key, 3, threshold=threshold, groups=groups, runs=runs)
    assert list_tokens(order, 0, 3 * sum(sizes)) == expected


@examples(40)
@given(SIZES, st.integers(0, 40), st.integers(1, 60))
def test_a_search_for_blocks_finds_what_their_list_has(
    sizes: list[int], start: int, length: int
) -> None:
    blocks = ListedBlocks(sizes)
    walk = naive_walk(sizes, start + length)[start:]
    for listed in (0, LISTED_BLOCKS):
        assert list_tokens(SequentialOrder(blocks, 0, listed=listed), start, start + length) == walk


def naive_walk(sizes: list[int], num_tokens: int) -> list[tuple[int, int, int]]:
    """(epoch, block, token) of the first tokens in the order of the files."""
    epoch = [(block, token) for block, size in enumerate(sizes) for token in range(size)]
    return [(k // len(epoch), *epoch[k % len(epoch)]) for k in range(num_tokens)]


@pytest.mark.parametrize(
    "name", ["block", "block in two levels", "document", "document in two levels"]
)
def test_orders_shuffle_anew_by_epoch_and_key(name: str) -> None:
    make = MAKERS[name]
    blocks = ListedBlocks([1] * 40)
    seen = set()
    for key in range(5):
        walk = list_tokens(make(blocks, key), 0, 5 * 40)
        seen |= {
            tuple(block for _, block, _ in walk[epoch * 40 : epoch * 40 + 40]) for epoch in range(5)
        }
    assert len(seen) == 25


@pytest.mark.long
def test_page_puts_every_block_everywhere_equally_often() -> None:
    order = BlockOrder(ListedBlocks([1] * 6), 11)
    epochs = 6000
    blocks = np.array([block for _, block, _ in list_tokens(order, 0, 6 * epochs)]).reshape(
        epochs, 6
    )
    counts = np.array([np.bincount(column, minlength=6) for column in blocks.T])
    assert np.abs(counts - epochs / 6).max() < 150


def test_page_holds_about_as_much_as_it_says() -> None:
    for num_blocks in (1000, 70_000):
        order = BlockOrder(ListedBlocks([1] * num_blocks), 1)
        kept = [order._group_cache, order._member_cache]
        for epoch in range(4):
            order.spans(np.array([epoch * num_blocks]), 1)
        held = sum(
            array.nbytes
            for recent in kept
            for listing in recent._values.values()
            for array in (listing.entries, listing.offsets)
        )
        assert held * 0.9 <= order.memory_bytes <= held * 1.5


def test_page_order_is_frozen() -> None:
    """Runs resume by sample number alone: another order here would break every run in progress."""
    blocks = ListedBlocks([1] * 12)
    one = [block for _, block, _ in list_tokens(BlockOrder(blocks, 1234), 12, 24)]
    two = [
        block
        for _, block, _ in list_tokens(BlockOrder(blocks, 1234, threshold=3, groups=4), 12, 24)
    ]
    assert one == [8, 1, 9, 0, 5, 2, 11, 10, 7, 3, 6, 4]
    assert two == [9, 5, 1, 2, 10, 6, 11, 7, 3, 8, 4, 0]


def test_sequential_keeps_the_blocks_in_place() -> None:
    order = ORDERS["sequential"].make(ListedBlocks([2, 0, 3]), 1)
    assert spans(order, 1, 9) == [(0, 0, 1, 2), (0, 2, 0, 3), (1, 0, 0, 2), (1, 2, 0, 2)]


def test_large_sources_are_frozen_too() -> None:
    """As above; of the constants that only large sources meet."""
    order = BlockOrder(ListedBlocks([1] * 70_000), 1234)
    assert [block for _, block, _ in list_tokens(order, 70_000, 70_006)] == [
        53753,
        38438,
        24144,
        40480,
        69068,
        32312,
    ]
    runs = BlockOrder(ListedBlocks([1] * 70), 1234, threshold=3, groups=5, runs=2)
    assert [block for _, block, _ in list_tokens(runs, 0, 14)] == [
        63,
        68,
        67,
        64,
        66,
        28,
        31,
        32,
        34,
        33,
        29,
        30,
        69,
        65,
    ]


def test_an_order_in_another_process_has_its_own_addresses() -> None:
    order = SequentialOrder(ListedBlocks([3, 1, 2]), 0)
    expected = spans(order, 0, 6)
    copied = pickle.loads(pickle.dumps(order))
    entries, offsets, columns = copied._listing
    assert columns[2:4] == (offsets.ctypes.data, entries.ctypes.data)
    assert spans(copied, 0, 6) == expected
