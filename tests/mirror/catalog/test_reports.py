"""What nodes report of the datasets that they hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megablend.mirror.catalog.catalog import LATEST
from megablend.mirror.catalog.reports import NodeReports


@pytest.mark.parametrize(
    ("shortfall", "is_settled"),
    [
        (None, True),
        ({}, False),
        ({"short": 5}, True),
        ({"gone": True}, True),
        ({"stuck": True}, True),
    ],
)
def test_what_is_settled(shortfall: dict[str, Any] | None, *, is_settled: bool) -> None:
    """All is held, or what is missing cannot come without a person; what other datasets lack does not count."""
    lacks: dict[str, Any] = {"missing": 5, "short": 0, "trouble": "", "gone": False, "stuck": False}
    shortfalls = {} if shortfall is None else {"a": {**lacks, **shortfall}}

    class Reports(NodeReports):
        async def read_progress(self) -> dict[str, dict[str, Any]]:
            others = {"a": lacks}
            return {
                f"d@{LATEST}": {"owing": shortfalls, "silent": []},
                f"e@{LATEST}": {"owing": others, "silent": []},
            }

    nodes: Any = SimpleNamespace(find_away=set)
    keys: Any = SimpleNamespace(prefix="p/")
    unused: Any = None
    reports = Reports(nodes, keys, unused, unused, unused, unused)
    assert asyncio.run(reports.is_settled("d")) is is_settled
