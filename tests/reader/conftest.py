"""Fixtures of the reader's tests."""

from __future__ import annotations

import pytest

from tests.reader.loader_threads import LoaderThreads


@pytest.fixture
def threads() -> LoaderThreads:
    """The threads of loaders that the test starts."""
    return LoaderThreads()
