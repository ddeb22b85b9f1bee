"""What nodes report of the datasets that they hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megablend.mirror.catalog.catalog import LATEST, Want
from megablend.mirror.catalog.mates import Mates
from megablend.mirror.catalog.reports import NodeReports, Progress, Shortfall


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
    shortfalls = {} if shortfall is None else {"a": Shortfall(**{**lacks, **shortfall})}
    want = Want(dataset="d", revision=LATEST, since=0.0)
    other = Want(dataset="e", revision=LATEST, since=0.0)

    class Reports(NodeReports):
        async def read_progress(self) -> list[Progress]:
            others = {"a": Shortfall(**lacks)}
            return [Progress(want, 2, shortfalls, []), Progress(other, 2, others, [])]

    nodes: Any = SimpleNamespace(find_away=lambda: ())
    keys: Any = SimpleNamespace(prefix="p/")
    unused: Any = None
    reports = Reports(Mates(nodes, keys), unused, unused, unused, unused)
    assert asyncio.run(reports.is_settled("d")) is is_settled
