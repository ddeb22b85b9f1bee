"""What lists all sources of a config, or of a run, is not called once for each source: with thousands of
sources, that would take minutes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import megablend
from megablend.operations.check import check
from tests.runs import make_config, write_blend

LISTING = {"all_sources", "sources_of", "stage_configs", "withdrawn", "_over_all_stages"}
"""The names of functions that take longer, the more sources there are."""


def count_listings(operation: Callable[[], object]) -> Counter[str]:
    """How often an operation calls each of the functions in LISTING."""
    counts = Counter[str]()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and name in LISTING and "megablend" in frame.f_code.co_filename:
            counts[name] += 1

    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return counts


OPERATIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "build": megablend.build,
    "open": megablend.open,
    "describe": megablend.describe,
    "describe, not committed": lambda config: megablend.describe(config | {"run": "other"}),
    "check": check,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_as_often_for_few_sources_as_for_more(tmp_path: Path, name: str) -> None:
    counts = []
    for num_sources in (2, 5):
        folder = tmp_path / str(num_sources)
        stages = [{"samples": 200}, {"sources": {"s0": {"weight": 3}}}]
        sources = write_blend(folder, *[1] * num_sources)
        config = make_config(folder, sources, samples=400, stages=stages)
        megablend.build(config)
        counts.append(count_listings(partial(OPERATIONS[name], config)))
    assert counts[0] == counts[1]
    assert counts[0]
