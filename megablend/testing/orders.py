"""The contract of every order: each epoch has each token exactly once, and reading can start at any
token.

class TestMyOrder(OrderContract):
    kind = OrderKind(MyOrder)
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from megablend.arrays import Int64s
from megablend.order.base import Blocks, Order
from megablend.order.registry import OrderKind

Token = tuple[int, int, int]
"""A token, given as its epoch, its block, and its number within the block."""


class ListedBlocks:
    """Blocks with listed token counts. Each block is one document, unless document lengths are
    given."""

    def __init__(self, sizes: Sequence[int], documents: Sequence[int] | None = None) -> None:
        self.listed = list(sizes)
        self.num_blocks = len(sizes)
        self.num_tokens = sum(sizes)
        self._documents = self.listed if documents is None else list(documents)

    @property
    def documents(self) -> Blocks:
        """Return the documents in the form of blocks: each document is one block."""
        return ListedBlocks(self._documents)

    def before(self, blocks: Int64s) -> Int64s:
        """Return the number of tokens before each of `blocks`. Both are int64 [n]."""
        running: Int64s = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.listed)])
        return running[blocks]

    def group_totals(self, num_groups: int, run: int) -> Int64s:
        """Return the number of tokens of each group of blocks, int64 [num_groups]. Block b belongs
        to group b // run % num_groups."""
        totals = np.zeros(num_groups, np.int64)
        for block, size in enumerate(self.listed):
            totals[block // run % num_groups] += size
        return totals

    def keep_group_totals(self, num_groups: int, run: int) -> None:
        """Do nothing, since totals are counted whenever they are needed."""


def list_tokens(order: Order, start: int, stop: int) -> list[Token]:
    """Return the tokens of a token range, in order."""
    rows, *columns = order.spans(np.array([start]), stop - start)
    assert not rows.any(), "spans of a single range have row 0"
    spans = list(zip(*(column.tolist() for column in columns), strict=True))
    assert all(first < last for _, _, first, last in spans), "no span is empty"
    return [
        (epoch, block, token) for epoch, block, first, last in spans for token in range(first, last)
    ]


class OrderContract:
    """The tests of an order. Subclass this class, and set `kind`."""

    kind: OrderKind
    """The order under test."""
    examples = 30
    """The number of random sources per test."""
    max_memory_bytes = 1 << 20
    """The maximum for `memory_bytes` of an order over at most 40 blocks."""

    def make(self, sizes: Sequence[int], key: int = 1) -> Order:
        """Return the order over blocks of these sizes."""
        return self.kind.make(ListedBlocks(sizes), key)

    def draw_sizes(self, name: str) -> Iterator[tuple[random.Random, list[int]]]:
        """Yield pairs of a random generator and the token counts of blocks, some of which are 0."""
        for number in range(self.examples):
            rng = random.Random(f"{name} {number}")
            sizes = [rng.choice([0, 1, rng.randrange(12)]) for _ in range(rng.randrange(1, 40))]
            sizes[rng.randrange(len(sizes))] += 1
            yield rng, sizes

    def test_every_token_of_each_epoch_once(self) -> None:
        """Each of three epochs has every token of every block once."""
        for rng, sizes in self.draw_sizes("once"):
            walk = list_tokens(self.make(sizes, rng.randrange(2**63)), 0, 3 * sum(sizes))
            total = sum(sizes)
            everything = [
                (block, token) for block, size in enumerate(sizes) for token in range(size)
            ]
            for epoch in range(3):
                part = walk[epoch * total : (epoch + 1) * total]
                assert sorted(part) == [(epoch, *token) for token in everything], sizes

    def test_entry_anywhere(self) -> None:
        """A token range is the same wherever reading starts."""
        for rng, sizes in self.draw_sizes("anywhere"):
            key = rng.randrange(2**63)
            walk = list_tokens(self.make(sizes, key), 0, 3 * sum(sizes))
            start = rng.randrange(len(walk))
            stop = rng.randrange(start, len(walk) + 1)
            assert list_tokens(self.make(sizes, key), start, stop) == walk[start:stop], (
                sizes,
                start,
                stop,
            )

    def test_many_ranges_at_once_equal_single_ones(self) -> None:
        """Ranges that are located together have the same spans as when they are located one by one.
        The ranges are in any order, may repeat and overlap, and may have different lengths."""
        for rng, sizes in self.draw_sizes("many"):
            order = self.make(sizes)
            length = rng.randrange(1, 9)
            starts = np.array([rng.randrange(3 * sum(sizes)) for _ in range(20)])
            for lengths in (
                np.full(20, length),
                np.array([rng.randrange(1, 9) for _ in range(20)]),
            ):
                spans = order.spans(starts, length if (lengths == length).all() else lengths)
                assert (np.diff(spans.rows) >= 0).all(), "rows ascend"
                for row, start in enumerate(starts.tolist()):
                    in_row = spans.rows == row
                    single = order.spans(np.array([start]), int(lengths[row]))
                    for column, expected in zip(spans[1:], single[1:], strict=True):
                        assert column[in_row].tolist() == expected.tolist(), (
                            sizes,
                            start,
                            lengths[row],
                        )

    def test_find_tokens_is_the_inverse(self) -> None:
        """`find_tokens` returns the position in an epoch of every stored token of a range, and each
        position once."""
        for rng, sizes in self.draw_sizes("inverse"):
            order = self.make(sizes)
            total = sum(sizes)
            epoch = rng.randrange(3)
            before = [sum(sizes[:block]) for block in range(len(sizes))]
            walk = list_tokens(order, epoch * total, (epoch + 1) * total)
            expected = {
                before[block] + token: epoch * total + i for i, (_, block, token) in enumerate(walk)
            }
            starts = np.array([rng.randrange(total) for _ in range(5)])
            stops = np.array([rng.randrange(start, total) + 1 for start in starts.tolist()])
            placed = order.find_tokens(epoch, starts, stops)
            assert (np.diff(placed.rows) >= 0).all(), "rows ascend"
            pieces = list(zip(*(column.tolist() for column in placed), strict=True))
            for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
                positions = [
                    (stored + i, first + i)
                    for which, stored, first, last in pieces
                    for i in range(last - first)
                    if which == row
                ]
                assert sorted(positions) == [
                    (token, expected[token]) for token in range(start, stop)
                ], (sizes, epoch)

    def test_consumes_whole_blocks_as_declared(self) -> None:
        """An order that consumes whole blocks reads each block to its end."""
        if self.kind.consumes_whole_blocks:
            for _, sizes in self.draw_sizes("whole"):
                _, _, blocks, starts, stops = self.make(sizes).spans(
                    np.zeros(1, np.int64), sum(sizes)
                )
                assert not starts.any()
                assert [sizes[block] for block in blocks] == stops.tolist()

    def test_a_range_longer_than_the_source_spans_epochs(self) -> None:
        """A range of 7 tokens of a source with two tokens spans four epochs."""
        tokens = list_tokens(self.make([0, 2, 0]), 5, 12)
        assert [epoch for epoch, _, _ in tokens] == [2, 3, 3, 4, 4, 5, 5]
        assert {block for _, block, _ in tokens} == {1}

    def test_far_positions(self) -> None:
        """Ranges at positions up to 2^60 have the right length and epoch."""
        order = self.make([5, 3, 8, 2, 6])
        epoch = 2**60 // 24
        assert len(list_tokens(order, epoch * 24 - 50, epoch * 24 + 50)) == 100
        assert list_tokens(order, epoch * 24, epoch * 24 + 1)[0][0] == epoch

    def test_empty_ranges_have_no_spans(self) -> None:
        """An empty range has no spans, and neither has an empty list of ranges."""
        order = self.make([5, 3])
        assert len(order.spans(np.array([7]), 0).rows) == 0
        assert len(order.spans(np.zeros(0, np.int64), 4).rows) == 0

    def test_memory_is_stated(self) -> None:
        """`memory_bytes` is plausible for a small source."""
        for _, sizes in self.draw_sizes("memory"):
            assert 0 <= self.make(sizes).memory_bytes <= self.max_memory_bytes

    def test_pickled_and_shared_between_threads(self) -> None:
        """A pickled copy and concurrent threads give the same result."""
        order = self.make([4, 0, 3, 9, 1, 2, 7], 5)
        sizes = [4, 0, 3, 9, 1, 2, 7]
        expected = list_tokens(order, 0, 5 * sum(sizes))
        copy: Order = pickle.loads(pickle.dumps(order))
        assert list_tokens(copy, 0, 5 * sum(sizes)) == expected
        agrees: list[bool] = []

        def read(offset: int) -> None:
            rows = range(offset, 4 * sum(sizes), 7)
            agrees.append(all(list_tokens(order, k, k + 9) == expected[k : k + 9] for k in rows))

        threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert agrees == [True] * 4
