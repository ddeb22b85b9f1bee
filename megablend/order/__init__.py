"""How a source's samples are laid over its blocks."""

from __future__ import annotations

from collections.abc import Callable

from megablend.order.base import Blocks, Order, RowBlocks
from megablend.order.page import PageOrder
from megablend.order.row import RowOrder
from megablend.order.sequential import SequentialOrder

__all__ = ["ORDERS", "Blocks", "Order", "RowBlocks"]

ORDERS: dict[str, Callable[[RowBlocks, int], Order]] = {
    "page": PageOrder,
    "row": RowOrder,
    "sequential": SequentialOrder,
}
"""Orders by name: (blocks, key) -> order."""
