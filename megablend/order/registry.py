"""The orders by name, with their requirements. An order's module is imported only when the order is
made, since configs are checked without numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from megablend.order.base import DocumentBlocks, Order

MakeOrder: TypeAlias = "Callable[[DocumentBlocks, int], Order]"
"""A function that makes the order of a source from its blocks and a random key."""


@dataclass(frozen=True, slots=True)
class OrderKind:
    """A kind of order, and the properties that other code depends on."""

    make: MakeOrder
    unit: Literal["block", "document"] = "block"
    """The smallest unit that the order shuffles. For "document" the index needs a table of the
    documents' lengths."""
    consumes_whole_blocks: bool = True
    """Whether a lane finishes a block before it begins another, so that each is read only once.
    Otherwise a block may be needed again at any time, and keeping it is not worth the memory."""


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
"""The names that release 0.1.0 uses for orders in configs and ledgers -> their names in
`ORDERS`."""


def current_name(name: str) -> str:
    """Return the name of an order in `ORDERS`, given this name or the name that release 0.1.0
    uses."""
    return OLD_NAMES.get(name, name)


def find_order(name: str) -> OrderKind:
    """Return the order with this name in `ORDERS` or in release 0.1.0. Raises: ValueError for an
    unknown name."""
    order = ORDERS.get(name) or ORDERS.get(current_name(name))
    if order is None:
        raise ValueError(f"found {name!r}, expected one of {', '.join(ORDERS)}")
    return order
