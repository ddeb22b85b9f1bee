"""How a source's samples are laid over its blocks."""

from __future__ import annotations

from collections.abc import Callable

from megablend.order.base import Blocks, Order
from megablend.order.page import PageOrder
from megablend.order.sequential import SequentialOrder

__all__ = ["ORDERS", "Blocks", "Order"]

ORDERS: dict[str, Callable[[Blocks, int], Order]] = {"page": PageOrder, "sequential": SequentialOrder}
"""Orders by name: (blocks, key) -> order."""
