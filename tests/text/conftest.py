from __future__ import annotations

import pytest

from megablend.text import source
from tests.caches.conftest import environments, moto, obstore, remote_moto

__all__ = ["environments", "moto", "obstore", "remote_moto"]
SMALL = 20_000


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of some kilobytes, so that files have several."""
    monkeypatch.setattr(source, "PART_BYTES", SMALL)
