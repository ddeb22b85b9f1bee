"""The contract of orders, for each order that is listed, and for some with other constants."""

from __future__ import annotations

from functools import partial

import pytest

from megablend.order.block import BlockOrder
from megablend.order.document import DocumentOrder
from megablend.order.registry import ORDERS, OrderKind
from megablend.testing.orders import OrderContract

KINDS = {
    **ORDERS,
    "block in two levels": OrderKind(partial(BlockOrder, threshold=3, groups=4)),
    "block in runs": OrderKind(partial(BlockOrder, threshold=3, groups=2, runs=2)),
    "document in two levels": OrderKind(
        partial(DocumentOrder, threshold=3, group=2), unit="document"
    ),
}


class TestOrders(OrderContract):
    @pytest.fixture(autouse=True, params=KINDS, ids=lambda name: f"[{name}]")
    def _chosen(self, request: pytest.FixtureRequest) -> None:
        self.kind = KINDS[request.param]
