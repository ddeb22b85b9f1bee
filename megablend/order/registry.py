"""The orders by name, and what each needs. Nothing is imported until an order is made: a config is checked without NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from megablend.order.base import DocumentBlocks, Order

MakeOrder: TypeAlias = "Callable[[DocumentBlocks, int], Order]"
"""(blocks of a source, key) -> its order."""


@dataclass(frozen=True, slots=True)
class OrderKind:
    """An order, and what others have to know about it."""

    make: MakeOrder
    unit: Literal["block", "document"] = "block"
    """What the order moves around in one piece. For "document" the index needs a table of the documents' lengths."""
    consumes_whole_blocks: bool = True
    """Whether a lane reads a block to its end before it leaves it, so that a block is read once. Otherwise the same block is
    needed again at any time, and keeping it is not worth the memory."""


def _make_block(blocks: DocumentBlocks, key: int) -> Order:
    from megablend.order.block import BlockOrder

    return BlockOrder(blocks, key)


def _make_document(blocks: DocumentBlocks, key: int) -> Order:
    from megablend.order.document import DocumentOrder

    return DocumentOrder(blocks, key)


def _make_sequential(blocks: DocumentBlocks, key: int) -> Order:
    from megablend.order.sequential import SequentialOrder

    return SequentialOrder(blocks, key)


ORDERS: dict[str, OrderKind] = {
    "block": OrderKind(_make_block),
    "document": OrderKind(_make_document, unit="document", consumes_whole_blocks=False),
    "sequential": OrderKind(_make_sequential),
}
OLD_NAMES = {"page": "block", "row": "document"}
"""What release 0.1.0 calls some orders, in configs and in ledgers."""


def current_name(name: str) -> str:
    """The name that an order has in `ORDERS`, for that name or the one of release 0.1.0."""
    return OLD_NAMES.get(name, name)


def find_order(name: str) -> OrderKind:
    """An order by its name, or by the one of release 0.1.0. Raises: ValueError for a name that no order has."""
    kind = ORDERS.get(current_name(name))
    if kind is None:
        raise ValueError(f"found {name!r}, expected one of {', '.join(ORDERS)}")
    return kind
