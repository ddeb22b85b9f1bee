"""An order that changes with an epoch gives each epoch's tokens in the order of that epoch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megablend.order.base import Order
from megablend.order.block import BlockOrder
from megablend.order.changing import ChangingOrder
from megablend.order.sequential import SequentialOrder
from megablend.testing.orders import ListedBlocks


@pytest.mark.parametrize("seed", range(5))
def test_each_epoch_is_in_its_own_order(seed: int) -> None:
    rng = random.Random(seed)
    blocks = ListedBlocks([rng.randrange(6) for _ in range(9)] + [2])
    block = BlockOrder(blocks, seed)
    sequential = SequentialOrder(blocks, seed)
    order = ChangingOrder(blocks, [(0, block), (2, sequential), (3, BlockOrder(blocks, seed + 1))])
    by_epoch: list[Order] = [
        block,
        block,
        sequential,
        BlockOrder(blocks, seed + 1),
        BlockOrder(blocks, seed + 1),
    ]
    tokens = []
    total = blocks.num_tokens
    for epoch, each in enumerate(by_epoch):
        spans = each.spans(np.array([epoch * total]), total)
        for number, start, stop in zip(
            spans.blocks.tolist(), spans.starts.tolist(), spans.stops.tolist(), strict=True
        ):
            tokens += [(epoch, number, token) for token in range(start, stop)]
    starts = np.array([rng.randrange(4 * total) for _ in range(20)])
    lengths = np.array([rng.randrange(1, total) for _ in range(20)])
    spans = order.spans(starts, lengths)
    found: list[list[tuple[int, int, int]]] = [[] for _ in starts]
    for row, epoch, number, start, stop in zip(*(column.tolist() for column in spans), strict=True):
        found[row] += [(epoch, number, token) for token in range(start, stop)]
    assert found == [
        tokens[start : start + length]
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    for epoch in range(5):
        placed = order.find_tokens(epoch, np.array([0]), np.array([total]))
        expected = by_epoch[epoch].find_tokens(epoch, np.array([0]), np.array([total]))
        assert all(np.array_equal(a, b) for a, b in zip(placed, expected, strict=True))
