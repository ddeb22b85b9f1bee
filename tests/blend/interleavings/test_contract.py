"""The contract of interleavings, for each that is listed."""

from __future__ import annotations

import pytest

from megablend.blend.interleavings.registry import INTERLEAVINGS
from megablend.testing.interleavings import InterleavingContract


class TestInterleavings(InterleavingContract):
    @pytest.fixture(autouse=True, params=INTERLEAVINGS, ids=lambda name: f"[{name}]")
    def _chosen(self, request: pytest.FixtureRequest) -> None:
        self.kind = INTERLEAVINGS[request.param]
